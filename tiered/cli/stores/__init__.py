"""Commands that work on stores at rest."""
