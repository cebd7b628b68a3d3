"""The policies that a configuration can name: the built-in ones and those of installed packages."""

from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points

from kvroute.policies.least_loaded import LeastLoaded
from kvroute.policies.min_prefill import MinPrefill
from kvroute.policies.power_of_two import PowerOfTwo
from kvroute.policies.prefix_affinity import PrefixAffinity
from kvroute.policies.random import Random
from kvroute.policies.round_robin import RoundRobin

ENTRY_POINT_GROUP = "kvroute.policies"

BUILT_IN: Mapping[str, type] = {
    "least_loaded": LeastLoaded,
    "min_prefill": MinPrefill,
    "power_of_two": PowerOfTwo,
    "prefix_affinity": PrefixAffinity,
    "random": Random,
    "round_robin": RoundRobin,
}


class PolicyLoadError(Exception):
    """An installed package offers a policy that can't be used; the text names the package and the reason."""


def load_policies(offered: Iterable[EntryPoint] | None = None) -> dict[str, type]:
    """Policy classes by the name that `use:` takes.

    `offered`: entry points of the group "kvroute.policies", by default those of all installed packages. Raises
    PolicyLoadError when one can't be imported, takes a name that is taken, or is not a dataclass with a `choose`.
    """
    policies = dict(BUILT_IN)
    for point in entry_points(group=ENTRY_POINT_GROUP) if offered is None else offered:
        package = point.dist.name if point.dist is not None else point.value
        if point.name in policies:
            raise PolicyLoadError(f"{package}: the policy name {point.name!r} is taken")
        try:
            policy = point.load()
        except Exception as error:
            raise PolicyLoadError(f"{package}: policy {point.name!r} can't be imported: {error}") from error
        if not (isinstance(policy, type) and hasattr(policy, "__dataclass_fields__") and hasattr(policy, "choose")):
            raise PolicyLoadError(f"{package}: policy {point.name!r} is not a dataclass with a method `choose`")
        policies[point.name] = policy
    return policies
