"""Text by which the S-node estimates what rows look like: those of Q, K and V (fastdecode/spart/balance.py), and the
inputs of the linears that are rounded to 4 bits (fastdecode/spart/calibration.py)."""

from __future__ import annotations

from fastdecode.demo import heldout_text
from fastdecode.text.tokenizer import Tokenizer

_NOVEL = 16_000  # characters

#: Prose, dialogue, code, tables and a few languages, so that most of a model's directions occur.
TEXT = """\
The river had been rising since Tuesday, and by the end of the week nobody in the village spoke of anything else. Old
Marten, who had kept the mill for forty years, walked down to the bridge each morning and cut a notch into the same
willow post. "It will turn before Sunday," he told anyone who asked, although he had been wrong before.
His daughter did not wait to find out. She carried the flour upstairs, sack by sack, and tied the boat to the kitchen
window.

Photosynthesis takes place in two stages. In the first, light splits molecules of water inside the thylakoid membranes;
oxygen escapes, and the energy is stored as ATP and NADPH. In the second, known as the Calvin cycle, the enzyme RuBisCO
fixes carbon dioxide into three-carbon sugars. A leaf therefore needs light, water and carbon dioxide at once, and the
slowest of the three limits its growth.

User: My train was cancelled and I have to be in Lyon by noon. What are my options?
Assistant: I'm sorry to hear that. There are three things you could do:
1. Take the 7:52 to Dijon and change there; you would arrive at 11:38.
2. Ask the station for a seat on the coach, which leaves at 8:15 and takes about four hours.
3. Rent a car. The drive is roughly 460 km, so allow five hours with a break.
If your ticket is refundable, I would choose the first one. Shall I check whether seats are left?

def moving_average(values: list[float], width: int) -> list[float]:
    \"\"\"Return the mean of each run of `width` neighbouring values.\"\"\"
    if width <= 0:
        raise ValueError("width must be positive")
    total, result = sum(values[:width]), []
    for i in range(width, len(values) + 1):
        result.append(total / width)
        if i < len(values):
            total += values[i] - values[i - width]
    return result

#include <stdio.h>
int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) printf("%s%c", argv[i], i + 1 < argc ? ' ' : '\\n');
    return 0;
}

SELECT customer_id, COUNT(*) AS orders, SUM(amount) AS total FROM invoices WHERE paid_on >= '2021-04-01' GROUP BY
customer_id HAVING COUNT(*) > 3 ORDER BY total DESC LIMIT 20;

{"name": "harbour", "lat": 53.54, "lon": 9.99, "open": true, "berths": [12, 14, 17], "notes": null}

| year | rainfall (mm) | mean temperature |
|------|---------------|------------------|
| 2018 | 612           | 10.4 C           |
| 2019 | 748           | 9.8 C            |

The committee met on 14 March 1987 to consider the appeal. Article 12 provides that "no member shall be removed from
office except by a vote of two thirds of those present". Since only nine of the sixteen members attended, the motion was
lost, and the chairman declared the session closed at 6.40 p.m. The newspapers called it a victory for common sense;
the opposition called it a disgrace.

To prove that the square root of 2 is irrational, suppose that it equals p/q in lowest terms. Then p^2 = 2 q^2, so p is
even, say p = 2r. It follows that 2 r^2 = q^2, so q is even as well, which contradicts the choice of p and q. QED.

Preheat the oven to 180 degrees. Whisk three eggs with 150 g of sugar until the mixture is pale, fold in 200 g of flour
and a pinch of salt, and bake for 35 minutes. Let the cake cool before you cut it!

Les enfants jouaient dans la cour pendant que leur grand-mere preparait le repas. Der Zug nach Hamburg hat heute leider
zwanzig Minuten Verspaetung. El perro duerme bajo la mesa, y nadie quiere despertarlo. Il mercato apre alle sette e
chiude a mezzogiorno.

Dear Ms. Okafor, thank you for your letter of last Friday. We have looked into the matter and found that the parcel was
delivered to the wrong address. A replacement left our warehouse this morning; you should receive it within two working
days. Please accept our apologies for the inconvenience. Yours sincerely, T. Lindqvist, Customer Service

What is the difference between weather and climate? Weather is what happens outside today; climate is what you can
expect over many years. Does one cold winter disprove that the planet is warming? No, because a single season says
little about an average over decades.

Installation: unpack the archive, change into its directory and run `make install`. Configuration is read from
/etc/gate.conf and from the environment, e.g. GATE_PORT=8080. If the daemon does not start, look into the log with
`journalctl -u gate -n 50` and check that the port is free. Version 2.3 fixes a crash when the list of hosts is empty.
"""


def calibration_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens of TEXT and of the end of the demo model's held-out novel, without special ones. Quality is measured
    from the novel's beginning on."""
    return tokenizer.encode(TEXT + heldout_text()[-_NOVEL:], add_special_tokens=False)
