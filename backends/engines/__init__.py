"""Adapters of installed serving engines: their own attention backend classes, unchanged, behind our contract.

No engine is part of this project or of its dependencies. An adapter finds one on the path (`--engine-path DIR`),
imports it when it is first asked (`environment`), and makes the scheduler objects that the engine's class wants.
"""
