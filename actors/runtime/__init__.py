"""Networks that run: on threads or inline, in one process or as partitions of many, on the host or on CUDA."""
