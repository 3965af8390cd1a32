"""What proves an engine or a backend right. It ships with kvoffload, which never imports it itself
(but for the commands that run it)."""
