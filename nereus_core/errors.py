"""Every exception Nereus raises, in one short hierarchy.

A message is up to three sentences: what happened with the values, what was expected, what to do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


class NereusError(Exception):
    """Base of all errors that Nereus raises on purpose; catching it never hides a bug of ours."""

    def __reduce__(self) -> tuple[object, ...]:
        """Let an error travel between processes: its parameters are not what it says."""
        return _as_it_was, (type(self), self.args, self.__dict__)


def _as_it_was(
    kind: type[NereusError], args: tuple[object, ...], values: dict[str, object]
) -> NereusError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(values)
    return error


def _names(values: Collection[object]) -> str:
    return ", ".join(str(v) for v in values) or "none"


# --- What the user wrote ----------------------------------------------------------------------


class ConfigError(NereusError):
    """A configuration key or value that cannot be used."""

    def __init__(self, key: str, problem: str, nearest: str | None = None) -> None:
        self.key, self.problem, self.nearest = key, problem, nearest
        hint = f" Did you mean {nearest!r}?" if nearest else ""
        super().__init__(f"{key}: {problem}.{hint}")


class ModelConfigError(NereusError):
    """A Hugging Face ``config.json`` lacks a field or has one that Nereus cannot use."""

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        super().__init__(f"model config field {field!r}: {problem}.")


class LayoutError(NereusError):
    """A TP/PP layout that the model's shapes do not allow; raised before anything is built."""

    def __init__(self, layout: object, model: str, problems: Sequence[str]) -> None:
        self.layout, self.model, self.problems = layout, model, tuple(problems)
        super().__init__(f"{layout} does not fit model {model!r}: {'; '.join(problems)}.")


class PlanError(NereusError):
    """A plan that breaks a rule of plans: devices, layouts, batch divisibility or memory."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"plan is not valid: {'; '.join(problems)}.")


class JobError(NereusError):
    """A job description that no plan can be made for: sizes, rates or devices make no sense."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(
            f"the job cannot be planned: {'; '.join(problems)}. Sizes and rates must be positive "
            "and finite; correct what the adapter or the configuration says."
        )


class ObservationError(NereusError):
    """What a job reported leaves nothing to go on with."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the observation cannot be used: {problem}.")


class NoFeasiblePlan(NereusError):
    """No plan fits in memory on the devices that are left."""

    def __init__(self, num_devices: int, tightest: str) -> None:
        self.num_devices = num_devices
        super().__init__(
            f"no plan fits on {num_devices} healthy devices; the nearest one fails because "
            f"{tightest}. Add devices, shorten responses, or allow more layouts."
        )


class CostInputError(NereusError):
    """A shape, rate or length that no cost can be predicted from."""

    def __init__(self, what: str, value: object, expected: str) -> None:
        self.what, self.value = what, value
        super().__init__(f"{what} is {value}; expected {expected}.")


# --- Adapters and plugins ---------------------------------------------------------------------


class AdapterError(NereusError):
    """An adapter cannot be found, loaded or created."""


class NoSuchAdapter(AdapterError):
    """No installed distribution provides an adapter of this name."""

    def __init__(self, name: str, installed: Sequence[str], broken: Sequence[str] = ()) -> None:
        self.name, self.broken = name, tuple(broken)
        note = f" (broken: {_names(broken)})" if broken else ""
        super().__init__(f"no adapter {name!r}; installed: {_names(installed)}{note}.")


class DuplicateAdapter(AdapterError):
    """Two distributions declare the same name of an adapter, or of a framework."""

    def __init__(self, name: str, first: str, second: str, kind: str = "adapter") -> None:
        super().__init__(f"{kind} {name!r} comes from both {first} and {second}; uninstall one.")


class BackendMissing(AdapterError):
    """The framework an adapter translates to is not installed."""

    def __init__(self, name: str, requirement: str, install: str) -> None:
        self.name, self.requirement, self.install = name, requirement, install
        super().__init__(f"adapter {name!r} needs {requirement}, which is not installed: {install}")


class DevicesMissing(AdapterError):
    """The machine lacks the devices that were asked for."""

    def __init__(self, kind: str, need: int, found: int) -> None:
        self.kind, self.need, self.found = kind, need, found
        super().__init__(f"needs {need} {kind} devices, this machine has {found}.")


class BackendVersion(AdapterError):
    """The framework is installed in a version outside the adapter's requirement."""

    def __init__(self, name: str, found: str, requirement: str) -> None:
        super().__init__(f"adapter {name!r} needs {requirement}, found {found}.")


class WrongHandle(AdapterError):
    """An adapter was given an object that is not its framework's job."""

    def __init__(self, name: str, got: object, expected: str) -> None:
        super().__init__(f"adapter {name!r} attaches to {expected}, got {type(got).__qualname__}.")


class SeamBroken(AdapterError):
    """A name in a framework that the adapter stands on is gone or has another shape."""

    def __init__(self, seam: str, found: str) -> None:
        super().__init__(f"seam {seam} does not hold: {found}.")


# --- Primitives and transitions ---------------------------------------------------------------


class PrimitiveError(NereusError):
    """A primitive that raised; ``op`` is the primitive or None where none was built yet."""

    def __init__(self, message: str, op: object = None) -> None:
        self.op = op
        super().__init__(message)


class Unsupported(PrimitiveError):
    """The adapter declares that it cannot do this."""

    def __init__(self, what: str, reason: str, op: object = None) -> None:
        super().__init__(f"{what} is not supported: {reason}", op)
        self.reason = reason


class Infeasible(PrimitiveError):
    """The primitive needs more memory than a device has, or a layout its model does not allow."""


class OutOfDeviceMemory(Infeasible):
    """The new shards do not fit beside what the device holds."""

    def __init__(self, what: str, device: object, need_bytes: int, have_bytes: int) -> None:
        self.device, self.need_bytes, self.have_bytes = device, need_bytes, have_bytes
        super().__init__(
            f"{what} needs {need_bytes / 2**30:.2f} GiB on {device}, "
            f"which has {have_bytes / 2**30:.2f} GiB."
        )


class NotAtBoundary(PrimitiveError):
    """A primitive was called outside a safe boundary, or for a stage the boundary does not hold."""

    def __init__(self, what: str, op: object = None) -> None:
        super().__init__(
            f"{what} outside a safe boundary that holds its stage; enter one first.", op
        )


class DevicesBusy(PrimitiveError):
    """Devices to be acquired still belong to somebody."""

    def __init__(
        self, what: str, holders: Sequence[tuple[object, object]], op: object = None
    ) -> None:
        self.holders = tuple(holders)
        held = ", ".join(f"{d} by {h}" for d, h in holders)
        super().__init__(f"{what}: still held: {held}.", op)


class Diverged(PrimitiveError):
    """Units that should be identical differ."""

    def __init__(self, units: Sequence[object], tensor: str, op: object = None) -> None:
        super().__init__(f"{_names(units)} differ in {tensor}; only identical units merge.", op)


class LastUnit(PrimitiveError):
    """The last unit of a model-stage cannot be destroyed."""

    def __init__(self, unit: object, op: object = None) -> None:
        super().__init__(
            f"destroy {unit}: it is the last unit of its model-stage; park it or extend first.", op
        )


class NoSuchUnit(PrimitiveError):
    """A primitive names a unit that is not alive."""

    def __init__(self, unit: object, alive: Collection[object], op: object = None) -> None:
        super().__init__(f"no unit {unit}; alive: {_names(alive)}.", op)


class UnitLost(PrimitiveError):
    """State is gone with a device; ``intact`` names the units that still hold theirs."""

    def __init__(self, lost: Sequence[object], intact: Sequence[object], cause: str = "") -> None:
        self.lost, self.intact = tuple(lost), tuple(intact)
        why = f" ({cause})" if cause else ""
        super().__init__(f"lost {_names(lost)}{why}; intact: {_names(intact)}.")


class StateDiffers(PrimitiveError):
    """A unit holds other state than the units it was made from; nothing may train on it."""

    def __init__(self, unit: object, what: str, found: object, expected: object) -> None:
        self.unit, self.what = unit, what
        super().__init__(f"{unit} holds {what} with {found}, its stage had {expected}.")


class Cancelled(NereusError):
    """Somebody asked for a transition to stop."""

    def __init__(self, transition: str) -> None:
        super().__init__(f"transition {transition} was cancelled.")


class StateLost(NereusError):
    """No intact copy of a model-stage's state is left; the job must resume from a checkpoint."""

    def __init__(self, stage: object, checkpoint: str | None, command: str | None = None) -> None:
        self.stage, self.checkpoint, self.command = stage, checkpoint, command
        where = f"the newest checkpoint is {checkpoint}" if checkpoint else "no checkpoint was kept"
        do = f" Resume with: {command}" if command else ""
        super().__init__(f"no intact copy of {stage} is left; {where}.{do}")


class CheckpointError(NereusError):
    """A checkpoint that cannot be written, read, or used for this job."""

    def __init__(self, folder: object, problem: str, remedy: str) -> None:
        self.folder, self.problem = folder, problem
        super().__init__(f"checkpoint {folder}: {problem}; {remedy}.")


class BoundaryTimeout(NereusError):
    """A stage did not become idle in time."""

    def __init__(self, stage: object, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        super().__init__(f"{stage} was still running after {timeout_s:g} s at a safe boundary.")


class WaitTimeout(NereusError):
    """Something awaited did not happen; the message names it."""

    def __init__(self, awaited: str, timeout_s: float) -> None:
        self.awaited, self.timeout_s = awaited, timeout_s
        super().__init__(f"waited {timeout_s:g} s for {awaited}.")


class SeatDead(NereusError):
    """A seat process ended while somebody relied on it."""

    def __init__(self, device: object, exit_code: int | None, doing: str) -> None:
        self.device = device
        super().__init__(f"seat {device} ended (exit code {exit_code}) during {doing}.")


class CycleError(NereusError):
    """A transition graph with a cycle, spelled out; never raised for a graph the compiler built."""

    def __init__(self, cycle: Sequence[object]) -> None:
        self.cycle = tuple(cycle)
        super().__init__(f"transition graph has a cycle: {' -> '.join(map(str, cycle))}.")


class TransitionFailed(NereusError):
    """A transition stopped part-way; the controller goes on from ``intact``."""

    def __init__(
        self,
        failed: object,
        cause: BaseException,
        *,
        done: Sequence[object] = (),
        pending: Sequence[object] = (),
        intact: Sequence[object] = (),
        parked: Sequence[object] = (),
        rolled_back: bool = False,
    ) -> None:
        self.failed, self.cause, self.parked = failed, cause, tuple(parked)
        self.done, self.pending, self.intact = tuple(done), tuple(pending), tuple(intact)
        self.rolled_back = rolled_back
        end = "the old plan goes on" if rolled_back else f"intact: {_names(intact)}"
        super().__init__(f"{failed} failed: {cause} {len(self.done)} primitives were done; {end}.")
