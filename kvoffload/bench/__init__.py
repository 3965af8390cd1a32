"""What ``kvoffload bench`` measures: ratios within one run, not seconds to compare across runs."""
