"""Checkpoints: what a run needs to go on, in files that any plan, and torch without us, can read.

trees, random_state     values as JSON beside tensors; what generators draw next
entries                 tensors by name, with who holds which part
content                 all that is saved, as one process has it; its optimizers in states/
writing                 the files of one process
folders                 which folders are flow.save's own, and what fields a manifest must have
manifest, newest        what a checkpoint holds, whether it is whole, and which is the newest
meeting, commit         all processes are done, and the folder gets its name
hosts, neighbours       in the memory of hosts, with copies on the next; host_search finds what they have together
saving, save            one save at a time, of copies that training leaves alone
load                    into any plan, each process its part
"""
