"""Prompts whose answers repeat much of them: texts to repeat or change, code and data to edit.

A small model seldom does what they ask and often copies: chosen are those that SmolLM2-135M-Instruct answers with a copy.
"""

from __future__ import annotations

_TEXT = (
    "The harbour master keeps a record of every ship that enters the bay. On Monday morning the Aurora "
    "arrived from Bergen with forty tons of dried fish, and the Meridian left for Lisbon with timber. On "
    "Tuesday the fog was so thick that no ship could enter, and the keeper of the lighthouse sounded the "
    "horn every two minutes. On Wednesday the Aurora left again, with a cargo of salt and wool, and her "
    "captain promised to be back before the first snow."
)

_JSON = """[
  {"name": "Alice Martin", "email": "alice.martin@example.com", "city": "Lyon", "age": 34, "active": true},
  {"name": "Bernd Schulz", "email": "bernd.schulz@example.com", "city": "Kiel", "age": 51, "active": false},
  {"name": "Carla Rossi", "email": "carla.rossi@example.com", "city": "Turin", "age": 28, "active": true},
  {"name": "Daniel Novak", "email": "daniel.novak@example.com", "city": "Brno", "age": 45, "active": true}
]"""

_CODE = """def read_orders(path):
    orders = []
    with open(path) as file:
        for line in file:
            fields = line.strip().split(",")
            order = {"id": int(fields[0]), "customer": fields[1], "total": float(fields[2])}
            orders.append(order)
    return orders


def total_by_customer(orders):
    totals = {}
    for order in orders:
        customer = order["customer"]
        totals[customer] = totals.get(customer, 0.0) + order["total"]
    return totals"""

_LIST = """1. Check the oil level of the engine before you start.
2. Check the pressure of all four tyres.
3. Clean the windscreen and the mirrors.
4. Test the brakes at low speed.
5. Test the lights, the horn and the indicators.
6. Put the warning triangle and the first-aid kit into the boot."""

PROMPTS = (
    f"Repeat this text:\n\n{_TEXT}\n\nRepeat the text above, word for word.",
    f"Replace `Aurora` by `Borealis` in this text and write all of it again:\n\n{_TEXT}",
    f"Write this text again with each sentence on a line of its own:\n\n{_TEXT}",
    f"Quote the text first, and then say what it is about:\n\n{_TEXT}",
    f"Write this list again, word for word:\n\n{_LIST}",
    f"Rename the variable `totals` to `sums` in this code and write all of it again:\n\n{_CODE}",
    f"Rename the function `read_orders` to `load_orders` in this code and write all of it again:\n\n{_CODE}",
    f"Rename the variable `order` to `item` in this code and write all of it again:\n\n{_CODE}",
    f"Rename the field `city` to `town` in this JSON and write all of it again:\n\n{_JSON}",
    f"Remove the field `active` from this JSON and write all of it again:\n\n{_JSON}",
)
