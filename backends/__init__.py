"""Who is asked: the contract of a backend, the registry, and the backends that ship with the harness."""
