"""The specs that leaves get on a mesh, computed from shapes and specs without devices."""

from __future__ import annotations

import numpy as np
import pytest
from jax.sharding import Mesh

import jaxckpt
from jaxckpt._arguments.specs import LeafGroup, assign_specs, resolve_specs

AXES = {"data": 4, "model": 2}
OPTIONS = jaxckpt.Options()


def test_saved_specs_are_carried_over_by_axis_name_and_given_ones_are_used() -> None:
    groups = [
        LeafGroup(["a"], (8, 8), own=(("old", "data"), ("model",))),
        LeafGroup(["b"], (8, 8), own=(("data",),), requested=((), ("model",))),
    ]
    assert assign_specs(AXES, groups, OPTIONS) == ([(("data",), ("model",)), ((), ("model",))], [])


def test_every_leaf_of_a_group_that_does_not_fit_is_a_problem_with_a_remedy() -> None:
    groups = [LeafGroup(["a", "b"], (6, 8), own=(("data",),)), LeafGroup(["c"], (8,), own=(("data",),))]
    _, problems = assign_specs(AXES, groups, OPTIONS)
    assert [problem.leaf for problem in problems] == ["a", "b"]
    assert all("dimension 0 of (6, 8) is not divisible by 4" in problem.reason for problem in problems)
    assert all('indivisible="replicate"' in problem.remedy for problem in problems)
    specs, problems = assign_specs(AXES, groups, jaxckpt.Options(indivisible="replicate"))
    assert (specs, problems) == ([((),), (("data",),)], [])


@pytest.mark.parametrize("given", [(("nope",),), (("data", "data"),), ((), (), ("data",))])
def test_a_problem_that_no_option_solves_has_no_remedy(given: tuple[tuple[str, ...], ...]) -> None:
    for options in (OPTIONS, jaxckpt.Options(indivisible="replicate")):
        (problem,) = assign_specs(AXES, [LeafGroup(["a"], (8, 8), requested=given)], options)[1]
        assert (problem.leaf, problem.remedy) == ("a", "")


def test_a_mesh_without_any_of_the_axes_is_an_error_that_names_the_leaves() -> None:
    groups = [LeafGroup(["a", "b"], (8,), own=(("old",),)), LeafGroup(["c"], (8,))]
    with pytest.raises(jaxckpt.errors.SpecError, match="none of the axes") as caught:
        assign_specs(AXES, groups, OPTIONS)
    assert caught.value.paths == ("a", "b")
    assign_specs({"data": 1}, groups, OPTIONS)  # a single device holds everything in any case


def test_a_mesh_in_place_of_specs_is_an_error() -> None:
    with pytest.raises(jaxckpt.errors.SpecError, match="specs is a mesh: pass it as mesh="):
        resolve_specs(Mesh(np.empty((), object), ()), [])
