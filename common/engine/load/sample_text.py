"""Text of many kinds, on which FP8 is measured (see `fp8_choice`): prose, talk, code, data, other languages.

Written for this purpose, so that no model has learned it by heart.
"""

SAMPLE_TEXT = """\
The ferry to the outer islands leaves twice a day in winter, at seven in the morning and again at half past three. On the quay
the crates are stacked by destination: bread and newspapers for the near ones, machine parts, medicine and animal feed for
those
that lie further out. When the wind stands in the north-west, nobody is surprised if the second crossing is cancelled. The
islanders have learned to keep a week's flour in the house, and the schoolteacher keeps two, because her pupils are always
hungry.

A lock on a canal is a simple machine. A boat enters the chamber, the gates behind it are closed, and water is let in or out
until the level inside equals the level ahead. No pump is needed: the water always flows downhill, and the boat is lifted by
what
comes from above. The cost is paid in water rather than in work, which is why engineers put reservoirs at the summit. A
flight of
five locks with a fall of three metres each raises a barge by fifteen metres and uses about as much water as a small town
drinks
in a day. Where water was scarce, builders added side ponds, which save between a third and a half of every filling.

Q: My bicycle chain jumps when I pedal hard. What should I look at first?
A: Most likely the chain has stretched. Measure twelve links with a ruler: they should be exactly 304.8 mm long. If they are
more
than two millimetres longer, replace the chain, and look at the sprockets as well, since a worn chain wears them too. If the
chain
is fine, check three more things:
1. the cable tension of the rear derailleur (turn the barrel adjuster by half a turn and try again);
2. a stiff link, which you will feel when you turn the pedals slowly backwards;
3. a bent hanger, common after the bicycle has fallen on its right side.

def moving_average(values: list[float], window: int) -> list[float]:
    \"\"\"Means of `window` neighbours; shorter at the beginning.\"\"\"
    if window < 1:
        raise ValueError(f"window must be positive, not {window}")
    total, means = 0.0, []
    for index, value in enumerate(values):
        total += value
        if index >= window:
            total -= values[index - window]
        means.append(total / min(index + 1, window))
    return means

SELECT customer.name, COUNT(*) AS orders, SUM(line.quantity * line.price) AS spent
FROM customer JOIN purchase ON purchase.customer_id = customer.id
JOIN line ON line.purchase_id = purchase.id
WHERE purchase.placed_at >= '2024-03-01' GROUP BY customer.name HAVING COUNT(*) > 3 ORDER BY spent DESC LIMIT 20;

{"station": "harbour-2", "time": "2023-11-04T06:20:00Z", "air": {"temperature_c": 4.6, "pressure_hpa": 1003.2, "humidity":
0.91},
 "wind": {"speed_ms": 11.8, "gust_ms": 17.3, "from_deg": 305}, "flags": ["gale warning", "sensor 3 recalibrated"], "valid":
true}

Let f be a continuous function on the closed interval from a to b, and suppose that f(a) and f(b) have opposite signs. Halve
the
interval. At the midpoint f is either zero, and we are done, or it has the same sign as at one of the two ends; keep the half
whose ends still have opposite signs. After n steps the interval is (b - a) / 2^n long, so twenty steps locate the root to
within
a millionth of the original length. The method is slow but it cannot fail, and for this reason careful programs fall back on
it
when Newton's method leaves the bracket. For example, x^3 - 2x - 5 changes sign between 2 and 3, and its root is
2.0945514815...

"You knew about the letter," said Marta. She did not raise her voice, and she went on peeling the apple in one long ribbon.
"You
knew in April, when we were still choosing curtains."
"I knew that there was one." Her brother looked out at the yard, where the rain had begun to collect in the wheelbarrow. "I
never
opened it. Father asked me not to, and then he died, and then it seemed too late to ask anybody anything."
"It is never too late to ask," she said. "It is only sometimes too late to be answered."

Lentil soup for four: soften one chopped onion, two carrots and a stick of celery in three spoonfuls of olive oil; add a
teaspoon
of cumin, half a teaspoon of smoked paprika, 250 g of brown lentils and 1.2 litres of stock. Simmer for 35 minutes, until the
lentils are tender but still whole. Season with salt, pepper and the juice of half a lemon. It tastes better on the second
day.

Cells that divide must first copy their DNA. The double strand is opened at many places at once, and at each of them two
copying
machines set off in opposite directions. One new strand can be made in one piece; the other, which runs the wrong way, is
made in
fragments of one or two hundred letters and joined afterwards. About one letter in a hundred thousand is wrong at first.
Proofreading and repair bring that down to one in a billion, so that a human cell makes only a handful of mistakes each time.

Dear Mr Okafor, thank you for your message of 12 May. We have looked into the delay: the parcel (no. 7734-B) was held at
customs
because the declared value, EUR 1,480.00, had been entered without a currency. It was released this morning and should reach
you by
Thursday. The express charge of EUR 38.50 will be refunded to your card within five working days. With apologies, Ines Brandt.

The treaty of 1648 did not end war in Europe, nor did those who signed it believe that it would. What it settled was who might
speak for whom. Small states could from now on conclude alliances in their own name, provided these were not directed
against the
Emperor; in practice the proviso was ignored within a generation. Historians have since argued about how new all this was.

Der Zug nach Freiburg hat heute etwa zwanzig Minuten Verspätung; die Reisenden warten auf Gleis sieben. Il pleuvait depuis
trois
jours et personne, au village, ne parlait plus que de la rivière. La biblioteca cierra a las ocho, pero los estudiantes pueden
quedarse en la sala de lectura hasta medianoche. 明天上午我们去博物馆，下午如果不下雨就去爬山。
来週の会議は水曜日に変更になりました。

| region | 2021 | 2022 | change |
|---|---|---|---|
| north | 1,204 | 1,377 | +14.4 % |
| south | 988 | 951 | -3.7 % |
| coast | 2,310 | 2,652 | +14.8 % |

To reset the router, hold the small button at the back for ten seconds until all lights go out. Wait two minutes. Then
connect a
computer with the yellow cable, open http://192.168.1.1 in a browser and sign in with the password on the label. Choose
"Restore
settings from file" only if you saved one before. If the third light keeps blinking red, the line itself is faulty: please
call us.
"""
