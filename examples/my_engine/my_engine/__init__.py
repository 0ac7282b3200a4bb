"""A serving engine of which this example holds the attention backend only."""
