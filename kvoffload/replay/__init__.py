"""What ``kvoffload replay`` does: a request trace through the whole system, every byte checked."""
