"""Seats as Ray actors: the same seat code, on as many machines as a Ray cluster has.

Importing this package imports no Ray. Files:

* `pool`      RayPool: what `LocalPool` does, on Ray
* `channel`   one seat's actor: calls out, replies in, and word of its death
* `actor`     what runs in the actor: a `Seat`
* `nodes`     which nodes hold the seats, which are about to leave, which have come back
* `session`   one connection to a Ray cluster, shared by the pools of a process
"""
