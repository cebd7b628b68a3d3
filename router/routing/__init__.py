"""One request's way: prompt, residency, estimates, policy, decision."""
