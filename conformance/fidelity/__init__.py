"""Whether the fakes are faithful: the same library calls, sound and malformed, on a fake and on the real library."""
