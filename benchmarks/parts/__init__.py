"""Parts of the benchmarks, which the commands beside this folder put together.

processes, alone                  a part in processes of its own; rounds in which all ways are timed in turn
eager_ops, eager_block            of benchmarks/eager.py
graph_models, graph_steps, graph_peers, graph_planning     of benchmarks/graph.py and predicted.py
pipeline_peers, hop               of benchmarks/pipeline.py
oneflow_boxing                    of benchmarks/boxing.py, under OneFlow's own Python
"""
