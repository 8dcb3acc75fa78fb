"""The values of an utterance's slots: rooms, devices by kind, things to buy, play and say.

Every name fits only its kind, so that an utterance has one meaning. Lists of several parts are
combined: ``reading`` and ``lamp`` is a light. There are many combinations, and some names begin
with a coined word, as in real households: a model learns to copy a name rather than to know it.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

AREAS = (
    "|small|big|old|new|upstairs|east",
    "kitchen|bedroom|living room|bathroom|office|garage|hallway|attic|basement|cellar|nursery|"
    "guest room|dining room|laundry room|pantry|library|studio|workshop|patio|balcony|garden|"
    "terrace|conservatory|playroom|den|foyer|entrance|utility room|sunroom|home gym|cinema room|"
    "music room|master bedroom|kids room|shed|greenhouse|porch|driveway|wine cellar|mud room|"
    "sauna|study|craft room|server room|dressing room|back yard|front yard|tool room|tea room|"
    "reading nook|closet|stairwell|lounge|parlor|bar|lobby|barn|loft|carport|gallery",
)

FLOORS = "ground|first|second|third|top|upper|lower|main"

# Kind of device: first parts; second parts. A single part is a list of complete names.
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
        "peter|quinn|rachel|sam|tina|umar|vera|walter|xenia|yusuf|zoe|anika|boris|chloe|dmitri|"
        "elena|felix|gita|hugo|ivan|jonas|kofi|lena|marta|nils|oskar|paula|raj|sofia|tariq|ursula|"
        "viktor|wendy|yara|anton|bella|cyrus|diego|esther|fatima|george|hanna|ines|julia|kurt|"
        "aisha|albert|amara|andre|astrid|beatrix|bruno|camille|chidi|clara|claude|dagmar|daphne|"
        "dilip|edgar|eleni|emil|farid|fiona|gemma|goran|greta|gustav|helga|hiro|ibrahim|ingrid|"
        "irene|ismael|jamal|jasper|joost|kamala|keiko|klaus|laszlo|leila|lorenzo|ludmila|magnus|"
        "malik|matteo|mehmet|milena|nadia|nikolai|noor|octavia|odette|omar|pavel|petra|priya|"
        "quentin|ravi|renata|rosalind|ruben|sanjay|selma|soren|stefan|svetlana|tadeusz|theo|"
        "tomas|ulrike|valentina|vikram|wanda|winston|yannick|yuki|zahra|zelda",
    ),
    "weather": (
        "london|paris|berlin|madrid|oslo|dublin|vienna|prague|lisbon|athens|rome|zurich|tokyo|"
        "boston|denver|seattle|toronto|sydney|cairo|lima|helsinki|warsaw|budapest|nairobi|chicago|"
        "munich|porto|seoul|delhi|bergen|geneva|havana|quito|riga|milan|lyon|perth|austin|naples|"
        "accra|amman|ankara|antwerp|bangkok|basel|beirut|belfast|bogota|bremen|bristol|brussels|"
        "calgary|cardiff|cologne|dakar|dallas|dresden|durban|edinburgh|galway|gdansk|glasgow|"
        "hanoi|houston|istanbul|jakarta|kampala|krakow|kyoto|lagos|leipzig|ljubljana|luxembourg|"
        "malaga|manila|marseille|melbourne|memphis|montreal|mumbai|nagoya|nice|odense|osaka|"
        "ottawa|palermo|phoenix|rotterdam|salzburg|santiago|sarajevo|seville|stockholm|"
        "tallinn|tampere|trieste|tunis|turin|utrecht|valencia|venice|vilnius|winnipeg|zagreb",
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

# Values of other slots: lists of parts to combine.
WILDCARDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "shopping_list_item": (
        (
            "|organic|fresh|cheap|two packs of|a bag of|a box of|some|three|half a pound of|"
            "vegan|extra large|local|gluten free|six",
            "milk|bread|eggs|butter|cheese|apples|bananas|tomatoes|onions|garlic|potatoes|rice|"
            "pasta|olive oil|salt|pepper|sugar|flour|coffee|green tea|orange juice|yogurt|"
            "chicken|salmon|ham|lettuce|carrots|peppers|mushrooms|honey|jam|peanut butter|cereal|"
            "toilet paper|dish soap|sponges|batteries|trash bags|shampoo|toothpaste|dog food|"
            "cat litter|red wine|sparkling water|dark chocolate|cookies|ice cream|frozen peas|"
            "maple syrup|soy sauce|light bulbs|paper towels|strawberries|cucumbers|spinach|"
            "broccoli|lemons|limes|avocados|cinnamon|tofu|oat milk|basil|candles|napkins|plums|"
            "walnuts|crackers|mustard|vinegar|beer|tuna|lentils|chickpeas|raisins|oats",
        ),
    ),
    "todo_list_item": (
        (
            "call|email|visit|pay|thank|write to|meet|invite|ring|text",
            "the plumber|the teacher|the dentist|grandma|the landlord|the electrician|uncle joe|"
            "the bank|the neighbours|the vet|the school|aunt mary|the accountant|the doctor",
        ),
        (
            "clean|fix|paint|replace|measure|move|sell|check|order|repair|wash|assemble",
            "the oven|the bike|the fence|the filter|the stairs|the gutters|the tent|the sofa|"
            "the car|the mower|the cupboard|the shelf|the window|the grill|the roof|the skis",
        ),
        (
            "water the plants|pay the rent|book a flight|renew the passport|walk the dog|"
            "send the invoice|buy new shoes|return the parcel|write a letter|mow the grass|"
            "pick up the laundry|order a cake|plan the menu|sharpen the knives|do the taxes|"
            "learn the poem|bake a pie|feed the hamster|print the tickets|backup the photos",
        ),
    ),
    "search_query": (
        (
            "abbey road|thriller|bohemian rhapsody|blue in green|hey jude|imagine|purple rain|"
            "clair de lune|the wall|billie jean|hotel california|summer hits|swan lake|serial|"
            "the daily|star wars|casablanca|the matrix|toy story|planet earth|breaking bad|"
            "the office us|frozen songs|moonlight sonata|fever|yesterday|dreams|jolene|respect|"
            "waterloo|heroes|africa|roxanne|wonderwall|creep|the four seasons|bolero|carmen",
        ),
        (
            "the beatles|pink floyd|nina simone|miles davis|daft punk|radiohead|johnny cash|abba|"
            "ella fitzgerald|rolling stones|queen|david bowie|aretha franklin|bob marley|mozart|"
            "dolly parton|fleetwood mac|coldplay|chopin|madonna|prince|metallica|vivaldi|blur",
        ),
        (
            "smooth|classic|morning|happy|deep|late night|slow|german|japanese|nineties|acoustic|"
            "rainy day|workout|latin|quiet|modern",
            "jazz|piano|focus|rock|soul|blues|country music|house music|pop songs|folk|ballads|"
            "reggae|opera|film music|disco|guitar",
        ),
    ),
    "message": (
        (
            "dinner|breakfast|lunch|the pizza|the soup|the tea|dessert|the bread|the roast",
            "is ready|is on the table|will be late today|has arrived|is getting cold|is served|"
            "will take ten minutes|is in the oven",
        ),
        (
            "grandma|the plumber|your teacher|someone|the taxi|uncle joe|the postman|a visitor|"
            "the neighbour|the doctor",
            "is at the door|is on the phone|is waiting outside|will be here soon|has left|"
            "wants to talk to you|is early",
        ),
        (
            "time for school|we are leaving in ten minutes|the laundry is done|happy birthday|"
            "please come downstairs|bedtime in five minutes|the movie is starting|good night all|"
            "turn down the music please|do not forget your umbrella|practice the violin now|"
            "put your shoes away|the dog needs a walk|brush your teeth|meeting in the study",
        ),
    ),
    "zone": (
        (
            "work|school|the gym|the supermarket|the airport|the hospital|the park|university|"
            "the beach|church|the mall|the train station|the stadium|the harbor|the library|"
            "the museum|the pool|the cinema|the farm|the clinic|the bakery|the zoo|the cabin",
        ),
    ),
    "timer_name": (
        (
            "|evening|big|family|quick|small|long",
            "pizza|egg|tea|pasta|workout|meditation|homework|bread|roast|nap|steak|rice|laundry|"
            "parking|cookies|chicken|yoga|potato|oven|dough|reading|shower|screen time|plank|"
            "coffee|soup|muffin|turkey|brownies|dentist|salmon|quiche|piano practice|stretching",
        ),
    ),
    "timer_command": (
        (
            "turn on|turn off|switch on|switch off|check|reset",
            "the lights|the sprinklers|the heating|the television|the lamps|the dishwasher|"
            "the radio|the heater|the fan|the oven|the coffee machine|the pump",
        ),
        (
            "open the curtains|lock the front door|play some music|close the garage door|"
            "water the lawn|feed the cat|boil the kettle|unlock the gate|mute the speakers|"
            "ring the bell|run the washing machine|pause the movie|open the windows|"
            "close the blinds|start the vacuum|dim the lamps",
        ),
    ),
}


# The share of additional names of a list that begin with a coined word of two or three syllables.
COINED = 0.25
ONSETS, VOWELS, ENDS = "b|d|f|g|h|j|k|l|m|n|p|r|s|t|v|w|z|br|st|tr", "a|e|i|o|u", "|n|r|l|s|k|m"


@dataclass(frozen=True)
class Names:
    """Values of the slots by list: "area", "floor", a wildcard list, or "name.light" and so on."""

    values: dict[str, tuple[str, ...]]

    def __getitem__(self, kind: str) -> tuple[str, ...]:
        return self.values[kind]


def seen_and_held_out(seed: int, share: float = 0.2) -> tuple[Names, Names]:
    """All names in two parts; the second, a share of each list but floors, is held out.

    Only the combination of a held-out combined name is new, not its words.
    """
    lists = {"area": _with_coined(AREAS, seed), "floor": _combined((FLOORS,))}
    lists |= {
        kind: tuple(name for parts in several for name in _with_coined(parts, seed))
        for kind, several in WILDCARDS.items()
    }
    lists |= {f"name.{kind}": _with_coined(parts, seed) for kind, parts in DEVICES.items()}
    seen, held_out = {}, {}
    for kind, values in lists.items():
        # Both kinds of buttons have one order, so that a name is held out for both or for neither.
        order = sorted(values, key=lambda value: random.Random(f"{seed} {value}").random())
        count = 0 if kind == "floor" else max(1, round(share * len(order)))
        held_out[kind], seen[kind] = tuple(order[:count]), tuple(order[count:])
    held_out["floor"] = seen["floor"]
    return Names(seen), Names(held_out)


def _with_coined(parts: tuple[str, ...], seed: int) -> tuple[str, ...]:
    """The combined names, and some whose first part is a coined word; none for a single part."""
    names = _combined(parts)
    if len(parts) == 1:
        return names
    rng = random.Random(f"{seed} {parts}")
    rest = _combined(parts[1:])
    coined = [f"{_coined_word(rng)} {rng.choice(rest)}" for _ in range(int(COINED * len(names)))]
    return (*names, *dict.fromkeys(coined))


def _coined_word(rng: random.Random) -> str:
    choices = [part.split("|") for part in (ONSETS, VOWELS, ENDS)]
    syllables = rng.choice((2, 2, 3))
    return "".join(rng.choice(part) for _ in range(syllables) for part in choices)


def _combined(parts: tuple[str, ...]) -> tuple[str, ...]:
    """Every combination of one choice from each part; an empty choice leaves the part out."""
    choices = [[choice.strip() for choice in part.split("|")] for part in parts]
    return tuple(" ".join(words).strip() for words in itertools.product(*choices))
