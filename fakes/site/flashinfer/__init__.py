"""`flashinfer` where the real one is not wanted: the fake, under its name."""

from fakes import shell

shell.expose(__name__)
