"""What may stand in an utterance's slots: rooms, devices by kind, things to buy, play and say.

Every name fits its kind and no other, so that an utterance has one meaning. Lists of two parts are
combined: ``reading`` and ``lamp`` is a light.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

AREAS = """kitchen|bedroom|living room|bathroom|office|garage|hallway|attic|basement|cellar|nursery|
guest room|dining room|laundry room|pantry|library|studio|workshop|patio|balcony|garden|terrace|
conservatory|playroom|den|foyer|entrance|utility room|sunroom|home gym|cinema room|music room|
master bedroom|kids room|shed|greenhouse|porch|driveway|wine cellar|mud room|sauna|study|
craft room|server room|dressing room|back yard|front yard|tool room|reading nook|tea room"""

FLOORS = "ground|first|second|third|top|upper|lower|main"

# Kind of device: first parts; second parts. One part alone is a list of whole names.
DEVICES = {
    "light": (
        "reading|bedside|desk|corner|piano|floating|amber|paper|crystal|window seat|bookshelf|"
        "mirror|copper|vintage|tripod|aquarium|easel|canopy|pendant|marble",
        "lamp|spotlight|lantern|bulb|chandelier|sconce|light strip",
    ),
    "switch": (
        "coffee|espresso|christmas tree|fish tank|towel|soldering|router|printer|pond|freezer|"
        "boiler|charger|humidifier|toaster|aquarium|bread",
        "outlet|plug|socket|power strip",
    ),
    "fan": (
        "exhaust|tower|pedestal|box|extractor|bamboo|turbo|whisper|loft|swivel|oscillating|breeze",
        "fan|ventilator|blower",
    ),
    "media_player": (
        "sony|samsung|vintage|bluetooth|portable|surround|kids|big|old|yamaha|retro|sonos",
        "speaker|television|soundbar|radio|record player|receiver",
    ),
    "climate": (
        "smart|wall|hot water|floor heating|nest|daikin|panel|infrared|baseboard|compact",
        "thermostat|heater|air conditioner|radiator|heat pump",
    ),
    "input_boolean": (
        "guest|vacation|quiet|night|movie|party|work|cleaning|baby|pet|focus|travel",
        "mode",
    ),
    "cover": (
        "left|right|skylight|east|west|north|south|bay window|velvet|bamboo|linen|corner",
        "blind|curtain|shade|awning|shutter|roller",
    ),
    "valve": (
        "main water|sprinkler|irrigation|gas|radiator|pool|hose|fountain|drip|boiler",
        "valve|tap|shutoff",
    ),
    "lock": (
        "front|back|side|cellar|storage|bike shed|mailbox|gun|wine|medicine|filing",
        "deadbolt|padlock|lock|latch",
    ),
    "binary_sensor": (
        "stair|cupboard|fridge|mailbox|crawl space|closet|safe|washing machine|trash|hatch|shelf",
        "detector|contact|motion sensor|occupancy sensor",
    ),
    "sensor": (
        "outdoor|indoor|rain|wind|solar|soil|water|air quality|power|gas|pool|noise",
        "meter|gauge|probe|monitor",
    ),
    "person": (
        "alice|bob|carol|david|emma|frank|grace|henry|isabel|jack|karen|liam|mia|noah|olivia|"
        "peter|quinn|rachel|sam|tina|umar|vera|walter|xenia|yusuf|zoe|anika|boris|chloe|dmitri",
    ),
    "weather": (
        "london|paris|berlin|madrid|oslo|dublin|vienna|prague|lisbon|athens|rome|zurich|tokyo|"
        "boston|denver|seattle|toronto|sydney|cairo|lima|helsinki|warsaw|budapest|nairobi",
    ),
    "vacuum": (
        "dusty|roomba|robo|speedy|turbo|little|silver|clever|lazy|mighty",
        "cleaner|sweeper|hoover|robot",
    ),
    "lawn_mower": ("green|red|robot|husqvarna|ride on|meadow|quick|orchard", "mower|grass cutter"),
    "scene": (
        "romantic|cozy|sunset|tropical|winter|relaxing|bright|dim|autumn|fireside|ocean|forest",
        "evening|morning|dinner|ambience",
    ),
    "button": (
        "doorbell|reset|panic|feeder|brew|garage remote|restart|call|elevator|snooze",
        "button|trigger",
    ),
    "script": (
        "bedtime|wake up|leaving home|arrival|watering|backup|lockdown|breakfast|goodbye|homework",
        "routine|sequence|program",
    ),
    "todo": (
        "chores|packing|hardware store|birthday|homework|wedding|camping|renovation|errands|"
        "reading|travel|moving|project|school|holiday",
        "list",
    ),
}
DEVICES["input_button"] = DEVICES["button"]

ITEMS = """milk|bread|eggs|butter|cheese|apples|bananas|tomatoes|onions|garlic|potatoes|rice|pasta|
olive oil|salt|pepper|sugar|flour|coffee|green tea|orange juice|yogurt|chicken|salmon|ham|lettuce|
carrots|peppers|mushrooms|honey|jam|peanut butter|cereal|toilet paper|dish soap|sponges|batteries|
trash bags|shampoo|toothpaste|dog food|cat litter|red wine|sparkling water|dark chocolate|cookies|
ice cream|frozen peas|maple syrup|soy sauce|light bulbs|paper towels|strawberries|cucumbers|spinach|
broccoli|lemons|limes|avocados|cinnamon"""

TASKS = """call the plumber|water the plants|pay the rent|book a flight|renew the passport|
walk the dog|clean the oven|fix the bike|send the invoice|buy new shoes|return the parcel|
write a letter|mow the grass|wash the car|pick up the laundry|order a cake|paint the fence|
email the teacher|change the filter|vacuum the stairs|plan the menu|sharpen the knives"""

MUSIC = """abbey road|thriller|bohemian rhapsody|blue in green|hey jude|imagine|purple rain|
clair de lune|the wall|billie jean|hotel california|smooth jazz|piano classics|summer hits|
the beatles|pink floyd|nina simone|miles davis|daft punk|radiohead|johnny cash|ella fitzgerald|
morning acoustic|deep focus|workout mix|the daily|serial|star wars|casablanca|the matrix|toy story|
planet earth|breaking bad|the office us|frozen songs|swan lake|moonlight sonata|rolling stones"""

MESSAGES = """dinner is ready|time for school|we are leaving in ten minutes|the laundry is done|
breakfast is on the table|please come downstairs|the pizza has arrived|bedtime in five minutes|
someone is at the door|the movie is starting|happy birthday|lunch will be late today|
the taxi is waiting outside|turn down the music please|grandma is on the phone|
the cake is in the oven|do not forget your umbrella|practice the violin now"""

ZONES = """work|school|the gym|the supermarket|the airport|the hospital|the park|university|
the beach|church|the mall|the train station|the stadium|the harbor"""

TIMER_NAMES = """pizza|egg|tea|pasta|workout|meditation|homework|bread|roast|nap|steak|rice|
laundry|parking|cookies|chicken|yoga|potato|oven|dough|reading|shower|screen time|plank|coffee|
soup|muffin|turkey|brownies|dentist"""

COMMANDS = """turn off the lights|open the curtains|start the dishwasher|lock the front door|
play some music|turn on the sprinklers|stop the radio|close the garage door|water the lawn|
turn up the heating|switch off the television|feed the cat|boil the kettle|dim the lamps|
unlock the gate|mute the speakers|ring the bell|run the washing machine|pause the movie"""

WILDCARDS = {
    "shopping_list_item": ITEMS,
    "todo_list_item": TASKS,
    "search_query": MUSIC,
    "message": MESSAGES,
    "zone": ZONES,
    "timer_name": TIMER_NAMES,
    "timer_command": COMMANDS,
}


@dataclass(frozen=True)
class Names:
    """Values of the slots by list: "area", "floor", a wildcard list, or "name.light" and so on."""

    values: dict[str, tuple[str, ...]]

    def __getitem__(self, kind: str) -> tuple[str, ...]:
        return self.values[kind]


def seen_and_held_out(seed: int, share: float = 0.2) -> tuple[Names, Names]:
    """All names in two parts; the second, a share of each list but floors, is never trained on.

    Of a combined name it is the combination that is held out, not its words.
    """
    lists = {"area": _split(AREAS), "floor": _split(FLOORS)}
    lists |= {kind: _split(values) for kind, values in WILDCARDS.items()}
    for kind, parts in DEVICES.items():
        names = [""]
        for part in parts:
            names = [f"{name} {end}".strip() for name in names for end in _split(part)]
        lists[f"name.{kind}"] = tuple(names)
    seen, held_out = {}, {}
    for kind, values in lists.items():
        # One order for buttons of both kinds: a name is held out everywhere or nowhere.
        order = sorted(values, key=lambda value: random.Random(f"{seed} {value}").random())
        count = 0 if kind == "floor" else max(1, round(share * len(order)))
        held_out[kind], seen[kind] = tuple(order[:count]), tuple(order[count:])
    held_out["floor"] = seen["floor"]
    return Names(seen), Names(held_out)


def _split(values: str) -> tuple[str, ...]:
    return tuple(value.strip() for value in values.replace("\n", "").split("|"))
