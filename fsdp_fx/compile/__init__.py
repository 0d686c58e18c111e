"""The compiled executor: the ``torch.compile`` backend named ``fsdp_fx``.

:mod:`.capture` gets graphs from AOTAutograd, :mod:`.partition` decides what is saved,
:mod:`.regions` cuts a graph where units are first used and compiles each distinct
region once, :mod:`.lowering` puts a slice of the program between the regions,
:mod:`.execution` runs it for the units at hand, and :mod:`.backend` ties them together.
"""
