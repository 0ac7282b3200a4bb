"""FlashInfer compiles a kernel for each combination of some settings: which ones a run needs, and having them ready.

Nothing here imports a kernel library, except `conformance.jit.child`, which runs in processes of its own.
"""
