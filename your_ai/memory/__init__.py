"""The memory of a run: gauges, limits, estimates, plans, and the policy that keeps it in budget."""
