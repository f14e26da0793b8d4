"""Parties of a mirror in processes of their own."""

import pickle
import sys
import time

from nereus_adapters.rollout.mirror import Party


def main() -> None:
    """Be a party: what to do comes pickled on stdin, what came of it goes to stdout."""
    pickle.dump("here", sys.stdout.buffer)  # imports are done
    sys.stdout.buffer.flush()
    told = pickle.load(sys.stdin.buffer)
    time.sleep(told["late_s"])  # the order in which parties come is what is tested
    try:
        party = Party(told["name"], told["names"], told["address"], timeout_s=told["timeout_s"])
        found = () if told.get("leaves") else party.exchange(told["shipments"])
        outcome = ("done", found)
        party.close()
    except Exception as error:
        outcome = (type(error).__name__, str(error))
    pickle.dump(outcome, sys.stdout.buffer)
    sys.stdout.buffer.flush()
    sys.stdin.buffer.read()  # what it received is held as long as it lives


if __name__ == "__main__":
    main()
