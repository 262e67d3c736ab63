"""Why a call lies as it does: `flow.explain`, what it gives, and `flow.explicit`."""
