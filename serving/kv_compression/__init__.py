"""Which K/V rows of a sequence to keep, how the rest is summarised, and how far that may be off."""
