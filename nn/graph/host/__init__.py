"""The host beside the device.

memory     memory from which a card copies, and files that are mapped
copies     copies there of what a backward will need
states     a parameter's master and states there, and its gradient on the way
"""
