"""Orders that are found.

task_graph        what devices have to do, what waits for what, the memory that it takes
lower_bound       what no order can be sooner than
list_order        an order by a list, within memory, forwards or backwards
exact_order       the shortest of a few tasks
order_tasks       the search of a short one, of any tasks
pipeline_order    that of a pipeline's F, B and W
slice_lengths     where sequences are cut for such a pipeline
"""
