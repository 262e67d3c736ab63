"""Published steps on 1 to 10,752 GPUs, asked of our own path: capture on meta, prices, schedules, `Plan.check`.

rows -> setting -> model, plan, cluster -> asked -> report

    published/  the tables, each with its source in its header
    setting     what a row says: a model, how it was trained, on which hardware
    rows        the reader of the tables, with the runs that may have been meant where one does not say
    models      GPT as Megatron has it, and Llama, on meta
    mixtures    Mixtral and DeepSeek, of which no table is here
    families    all of these by name
    plans       the text of a run's plan
    hardware    its cluster
    asked       one run in a process of its own, remembered by what it depends on; of several the quickest that fits
    baseline    one share of peak and the bubble, which is all that most tables ask for
    refit       a fit to all other tables, which has not seen this one
    pairs       of two runs of a model, whether the quicker one is named; of many, how good the one is that is picked
    chart       predicted against published seconds, as SVG
    report      the tables
"""
