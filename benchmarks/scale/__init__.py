"""Published steps on 1 to 10,752 GPUs, asked of our own path: capture on meta, prices, schedules, `Plan.check`.

rows -> setting -> model, plan, cluster -> asked -> report

    published/  the tables, each with its source in its header
    setting     what a row says: a model, how it was trained, on which hardware
    rows        the reader of the tables
    models      GPT as Megatron has it, and Llama, on meta
    plans       the text of a row's plan
    hardware    its cluster
    asked       one row in a process of its own, remembered by what it depends on
    baseline    one share of peak and the bubble, which is all that most tables ask for
    report      the tables
"""
