"""Writing a new backend: a distribution of its own, made of the files under ``template/``."""

from kvoffload.new_backend.write import NewBackend, check_name, write

__all__ = ["NewBackend", "check_name", "write"]
