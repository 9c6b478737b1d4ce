"""Text that is not the user's: chat templates and stop matching. Knows no tokens and no model."""
