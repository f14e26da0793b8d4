"""What the stand asks of its actors; runs inside them, where `stand` must not be imported."""


def forget(turns):
    turns.taken.clear()


def hold(server):
    server.going.clear()


def release(server):
    server.going.set()


def begun(server):
    return server.begun


def turns_away(server):
    return server._rejecting


def weights(server):
    return {name: tensor.numpy().copy() for name, tensor in server.model.state_dict().items()}


def version(server):
    return server.global_steps
