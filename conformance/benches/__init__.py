"""What the harness costs and how sharp it sees, in numbers; no test asserts them."""
