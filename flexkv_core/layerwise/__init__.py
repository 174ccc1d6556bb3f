"""Layer by layer (IP mode): how an engine's forward pass waits for each layer of its loads.

``waits`` is what an engine uses; ``counters`` the descriptors that wake it, ``handshake`` how they get
to a worker in another process.
"""
