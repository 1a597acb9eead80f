"""Attaching to engines that are really there, beside witnesses that read the same by other means."""
