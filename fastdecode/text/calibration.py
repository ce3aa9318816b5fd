"""Text by which the S-node estimates what rows look like: those of Q, K and V
(fastdecode/spart/int4/balance.py), and the inputs of the linears that are rounded to 4 bits
(fastdecode/spart/int4/calibration.py)."""

from __future__ import annotations

import re
from importlib import metadata

from fastdecode.demo import heldout_text
from fastdecode.text.tokenizer import Tokenizer

_NOVEL = 16_000  # characters
_OF_A_README = 512  # tokens

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

# Lantern

Lantern turns a folder of notes into a small web site. It needs no database, starts in less than a second, and writes
plain HTML that any server can deliver. **Status:** beta; the file format will not change any more.

## Quick start

```bash
git clone https://example.org/lantern.git && cd lantern
python3 -m venv .venv && . .venv/bin/activate
pip install -e .
lantern build --source notes --target site --theme plain
lantern serve --port 4000 &
curl -s http://localhost:4000/index.html | head -n 5
```

The first build reads every file; later builds only read what has changed since. If a page looks wrong, delete the
folder `.cache` and build again. See [the manual](docs/manual.md) for all options.

| Option | Default | Meaning |
|---|---|---|
| `--source DIR` | `.` | where the notes are |
| `--target DIR` | `site` | where the pages are written |
| `--jobs N` | number of cores | how many pages are rendered at once |
| `--watch` | off | build again whenever a file changes |

### What you should know

- Links between notes are checked at build time, so a broken link is an error and not a surprise.
- Images wider than 1,600 pixels are made smaller; the originals stay untouched.
- A note with `draft: true` in its header is left out, unless you pass `--drafts`.
- On Windows, paths are compared without regard to upper and lower case.

## How fast is it?

On a laptop with four cores, 10,000 notes (about 80 MB) take 6.2 s the first time and 0.4 s after a change to one of
them. Most of the time is spent in the Markdown parser, which handles roughly 15 MB per second and core. Memory grows
with the number of pages: expect 120 MB plus 3 KB for each. These figures are medians of five runs; your machine will
differ.

Q: Can I use my own theme?
A: Yes. Copy `themes/plain` to a new folder, change the templates, and pass its name with `--theme`.

Q: Why does the server refuse to start?
A: Usually because another process already listens on the port. `ss -ltnp` shows which one.

---

A bridge has to carry three kinds of load: its own weight, the traffic that crosses it, and the forces of wind, water
and temperature. In an arch, the stones are pressed together, and since stone withstands pressure well, Roman arches
still stand after two thousand years. A suspension bridge works the other way round. Its cables are pulled, not
pushed, and steel is strong in tension; that is why the longest spans in the world hang from cables. Engineers
multiply the largest load they expect by a safety factor, often between two and three, because materials age and
calculations simplify.

The heart of an adult beats between 60 and 100 times a minute at rest. Blood that is low in oxygen enters the right
atrium, flows into the right ventricle, and is pumped to the lungs. It returns through the pulmonary veins to the left
side, from where the aorta distributes it to the rest of the body. Regular exercise lowers the resting rate, because a
stronger muscle moves more blood with each beat. See a doctor if you notice chest pain, shortness of breath or fainting.

In economics, the price of a good is said to be in equilibrium when the quantity that sellers offer equals the
quantity that buyers want. If the price is higher, goods remain unsold and sellers lower it; if it is lower, buyers
compete and push it up. The model assumes that everyone knows all prices and that no single seller is large enough to
set them, which is rarely true. For example, a town with only one pharmacy may pay more than a city with twenty.

The treaty was signed in 1648 and ended thirty years of war. It confirmed that rulers could choose the religion of
their territories, but it also protected some minorities. Historians disagree about how much it changed: some call it
the birth of the modern state, others point out that the old institutions survived for another hundred and fifty
years.

User: Write a short e-mail to my team about moving our weekly meeting from Monday to Wednesday.
Assistant: Subject: New time for our weekly meeting

Hi everyone,

Starting next week, our weekly meeting moves from Monday to Wednesday at 10:00 a.m. The room stays the same, and so does
the agenda. If the new time does not work for you, please let me know by Friday.

Best regards,
Priya

User: What is the sum of the first 20 odd numbers? Explain step by step.
Assistant: The first odd number is 1 and the twentieth is 2 * 20 - 1 = 39. The numbers form an arithmetic sequence, so
their sum is the number of terms times the mean of the first and the last term: 20 * (1 + 39) / 2 = 400. In general,
the sum of the first n odd numbers is n^2. You can check this with small cases: 1 = 1, 1 + 3 = 4, 1 + 3 + 5 = 9. So
the answer is 400.

User: Give me five ideas for a rainy afternoon with two small children.
Assistant: Of course! Here are five ideas:
1. Build a fort from chairs and blankets, and read a story inside it with a flashlight.
2. Bake simple cookies together; let the children cut out the shapes.
3. Hold an indoor treasure hunt with drawings as clues.
4. Make puppets out of old socks and put on a short play.
5. Put on rain boots and jump into puddles. After all, it is only water.

class Account:
    \"\"\"A bank account that refuses to go below its limit.\"\"\"

    def __init__(self, owner: str, limit: float = 0.0) -> None:
        self.owner = owner
        self.limit = limit
        self._entries: list[tuple[datetime, float, str]] = []

    @property
    def balance(self) -> float:
        return sum(amount for _, amount, _ in self._entries)

    def withdraw(self, amount: float, note: str = "") -> None:
        if amount <= 0:
            raise ValueError(f"cannot withdraw {amount:.2f}")
        if self.balance - amount < -self.limit:
            raise InsufficientFunds(self.owner, amount)
        self._entries.append((datetime.now(timezone.utc), -amount, note))

async function fetchUsers(ids) {
  const responses = await Promise.all(ids.map((id) => fetch(`/api/users/${id}`)));
  for (const response of responses) {
    if (!response.ok) throw new Error(`HTTP ${response.status}: ${response.statusText}`);
  }
  return Promise.all(responses.map((r) => r.json()));
}

static int compare(const void *a, const void *b) {
    const struct item *x = a, *y = b;
    return x->key < y->key ? -1 : x->key > y->key; /* no overflow, unlike a difference */
}

fn longest<'a>(words: &[&'a str]) -> Option<&'a str> {
    words.iter().copied().max_by_key(|word| word.chars().count())
}

services:
  web:
    image: registry.example.org/shop/web:1.8.2
    ports: ["8080:80"]
    environment:
      LOG_LEVEL: info
      DATABASE_URL: postgres://shop@db:5432/shop
    depends_on: [db]
    restart: unless-stopped

<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>Opening hours</title><link rel="stylesheet" href="style.css"></head>
<body><h1>Opening hours</h1><p class="note">We are closed on public holidays.</p>
<ul><li>Monday to Friday: 9:00 - 18:30</li><li>Saturday: 10:00 - 14:00</li></ul></body>
</html>

2023-11-02 07:14:55,120 INFO  scheduler: job 4711 started on worker-3 (queue wait 0.8 s)
2023-11-02 07:14:57,483 WARN  storage: retrying upload of part 12/40 after timeout (attempt 2 of 5)
2023-11-02 07:15:02,009 ERROR scheduler: job 4711 failed: disk quota exceeded on /data/scratch
Traceback (most recent call last):
  File "/srv/app/worker.py", line 88, in run
    writer.flush()
OSError: [Errno 122] Disk quota exceeded: '/data/scratch/part-00012.tmp'

To replace the filter, switch the machine off and wait until it has cooled down. Open the flap at the bottom, put a
flat bowl below it, and turn the lid to the left. About half a litre of water will run out. Clean the filter under
warm water, remove threads and coins, and screw it back in until it clicks. If the display still shows E18, the hose
may be bent.

Each request passes through three stages: it is parsed, it waits in a queue, and a worker answers it. When the queue
is full, new requests are refused with status 503 and a header that says when to try again. The length of the queue
bounds both memory and the longest wait: with 200 entries and a mean service time of 15 ms, a request waits at most 3
s. Monitor `queue_length` and `requests_refused_total`; an alert on the latter is more useful than one on the
processor's load.

Upgrading from 2.x: the settings file is now TOML instead of INI. Run `app migrate-config old.ini > new.toml`, compare
the two, and restart the service one node at a time. Clients of version 2.4 or later work with both. If anything goes
wrong, the old package can be installed again, since the data directory has not changed.

We compared two methods on 1,284 patients in a randomized trial. The primary outcome was the number of days without
pain within twelve weeks. The mean difference was 4.1 days (95% confidence interval 2.6 to 5.7; p < 0.001) in favour
of the new method. There was no difference in adverse events. The study was not blinded, and a quarter of the
participants were lost to follow-up; therefore, the results should be interpreted with caution.

Let f be a continuous function on the closed interval [a, b] with f(a) < 0 < f(b). Then there is a point c between a
and b with f(c) = 0. Proof. Let S be the set of all x in [a, b] with f(x) < 0. S is not empty, because it contains a,
and it is bounded by b, so it has a least upper bound c. If f(c) were negative, f would be negative slightly to the
right of c, which contradicts the choice of c as an upper bound; if f(c) were positive, a smaller upper bound would
exist. Hence f(c) = 0.

"You have been very quiet," said Eleanor, putting down her cup. "Did the letter bring bad news?"
Thomas turned it over in his hands. The seal was broken, but he had not read further than the first line. "It is from my
brother," he said at last. "He wants to come home."
Neither of them spoke for a while. Outside, the wind drove the last leaves across the lawn, and somewhere in the house a
door closed softly.

The city council voted 7 to 4 on Tuesday evening to close Market Street to cars for a trial period of six months. Shop
owners had warned that customers would stay away, while residents spoke of noise and dangerous crossings. "We will count
visitors every week and decide on the basis of figures," the mayor said. Buses will continue to run every ten minutes.

Terms of use: The software is provided "as is", without warranty of any kind, express or implied. In no event shall
the authors be liable for any claim, damages or other liability arising from the use of the software. You may copy,
modify and distribute it, provided that this notice is included in all copies.

The dataset contains 52,310 photographs of 214 species of birds, taken between 2009 and 2021. We split it by location,
not at random, so that pictures of the same nest never appear in both parts. A linear classifier on top of the frozen
network reached an accuracy of 81.3%; training all layers raised it to 88.9%, at ten times the cost. Errors were most
frequent for gulls and for young birds, whose plumage differs from that of their parents.

Mars has the largest volcano in the solar system, Olympus Mons, which is nearly 22 km high. The planet's atmosphere is
thin and consists mostly of carbon dioxide. Its day lasts 24 hours and 37 minutes, but its year is almost twice as
long as ours. Liquid water probably flowed across its surface three billion years ago; today ice remains at the poles
and underground.

Dear diary, nothing went as planned today. I missed the bus, forgot my umbrella, and spilled coffee on the report that
was due at nine. But then Maya called to say she got the job!!! We are going to celebrate on Saturday, maybe at that
tiny Vietnamese place near the station. I can't wait. """


def calibration_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens of TEXT, of readmes() and of the end of the demo model's held-out novel, without special ones. Quality
    is measured from the novel's beginning on."""
    parts = [tokenizer.encode(text, add_special_tokens=False) for text in (TEXT, *readmes(), heldout_text()[-_NOVEL:])]
    return [*parts[0], *(token for part in parts[1:-1] for token in part[:_OF_A_README]), *parts[-1]]


def readmes() -> list[str]:
    """What the packages that this one requires say of themselves: Markdown, reStructuredText, commands and code.
    Packages without a description, as some systems install them, are left out."""
    return [text for name in _required() if (text := _description(name))]


def _required() -> list[str]:
    """The packages that are required without an extra."""
    try:
        requirements = metadata.requires("fastdecode") or []
    except metadata.PackageNotFoundError:  # run from a directory, not installed
        return []
    return [re.split(r"[^\w.-]", line)[0] for line in requirements if "extra ==" not in line]


def _description(name: str) -> str:
    try:
        return metadata.metadata(name).get("Description") or ""
    except metadata.PackageNotFoundError:
        return ""
