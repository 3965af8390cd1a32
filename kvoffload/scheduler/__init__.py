"""The scheduler side: what is kept, under which key, and what goes when space is short."""
