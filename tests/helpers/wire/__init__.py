"""Links and what happens to them: steps with checked results, hostile peers, proxies, wires that are cut."""
