"""The S-Part: everything of the model that has weights, under torch. Knows a link, never which transport."""
