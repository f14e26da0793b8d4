"""Sets of devices as integers: exact for every group, whatever groups have in common."""

from hypothesis import given
from hypothesis import strategies as st

from nereus_core.cluster import Device
from nereus_core.transition.atoms import Atoms, bits

D = [Device("node0", i) for i in range(8)]
GROUPS = st.lists(st.lists(st.sampled_from(D), unique=True).map(tuple), max_size=6)


def devices_of(atoms, mask):
    return [d for bit in bits(mask) for d in atoms.devices()[bit]]


@given(GROUPS)
def test_a_group_is_the_union_of_its_atoms(groups):
    atoms = Atoms(groups)
    for group in groups:
        assert sorted(devices_of(atoms, atoms.masks[group])) == sorted(group)


@given(GROUPS)
def test_devices_are_one_atom_when_no_group_tells_them_apart(groups):
    atoms = Atoms(groups)
    kinds = {tuple(d in group for group in groups) for group in groups for d in group}
    assert len(atoms.devices()) == len(kinds)


def test_groups_that_do_not_meet_are_the_atoms():
    atoms = Atoms([(D[0], D[1]), (D[3], D[2]), (D[0], D[1])])
    assert atoms.devices() == {1: (D[0], D[1]), 2: (D[3], D[2])}
    assert atoms.masks[D[0], D[1]] & atoms.masks[D[3], D[2]] == 0
