"""The full simulated CUDA device: a C++ extension that owns the CUDA dispatch key of a CPU build of torch.

Tensors are natively on `cuda:0`, in every thread; CUDA graphs capture and replay; pinned memory lies on pages
that can be closed while a copy is in flight.
"""
