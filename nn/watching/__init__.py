"""Watching a training: `flow.watch` runs a step and writes down how it goes.

watch       a watched step: counts what it runs, and makes a line every so many steps
figures     the figures of a line: speed, share of the peak, memory, moves, seen beside what was predicted
sinks       where lines go: JSON lines, TensorBoard, W&B, a function; progress: the bar, or lines of text
"""
