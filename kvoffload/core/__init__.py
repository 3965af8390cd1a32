"""The core: knows no accelerator, no engine, no plugin manager."""
