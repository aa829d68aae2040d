"""Words for task prompts."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PLACES = _words("store garden restaurant school hospital office house station")
OBJECTS = _words("ring kiss bone basketball computer necklace drink snack")
NAMES = _words(
    "Michael Christopher Jessica Matthew Ashley Jennifer Joshua Amanda Daniel David James Robert "
    "John Joseph Andrew Ryan Brandon Jason Justin Sarah William Jonathan Stephanie Brian Nicole "
    "Nicholas Anthony Heather Eric Elizabeth Adam Megan Melissa Kevin Steven Thomas Timothy Kyle "
    "Rachel Laura Lauren Amber Danielle Richard Kimberly Jeffrey Amy Crystal Michelle Tiffany "
    "Jeremy Mark Emily Aaron Charles Rebecca Jacob Stephen Patrick Sean Erin Jamie Kelly Samantha "
    "Nathan Sara Dustin Paul Angela Tyler Scott Andrea Gregory Erica Mary Travis Lisa Kenneth "
    "Bryan Lindsey Jose Alexander Jesse Katie Lindsay Shannon Vanessa Courtney Alicia Cody Allison "
    "Bradley Samuel"
)
"""The names, like the places and objects above, are from Wang et al. (2022)."""
EVENTS = _words(
    "abduction accord affair agreement appraisal assaults assessment attack attempts campaign "
    "captivity case challenge chaos clash collaboration coma competition confrontation conflict "
    "conquest consultation contact contest contract convention cooperation custody deal decline "
    "decrease demonstrations development disagreement disorder dispute domination dynasty effect "
    "effort employment endeavor engagement epidemic evaluation exchange existence expansion "
    "expedition experiments fall fame flights friendship growth hardship hostility illness impact "
    "imprisonment improvement incarceration increase insurgency invasion investigation journey "
    "kingdom marriage modernization negotiation notoriety obstruction operation order outbreak "
    "outcome overhaul patrol pilgrimage plague plan practice process program progress project "
    "pursuit quest raids reforms reign relationship retaliation riot rise rivalry romance rule "
    "sanctions shift siege slump stature stint strikes study test testing tests therapy tour "
    "tradition treaty trial trip unemployment voyage warfare work"
)
"""Events from Hanna et al. (2023) that last from one year to another."""
THINGS = _words(
    "key door table picture letter book chair bottle window bag cabinet garden bridge tower road "
    "tree shop wall boat car truck painting house river lamp"
)
PEOPLE = _words(
    "teacher doctor student lawyer farmer pilot author senator manager driver neighbor friend "
    "guard artist singer player soldier customer actor brother"
)
WOMEN = _words(
    "Mary Sarah Jessica Jennifer Amanda Emily Elizabeth Rachel Laura Rebecca Lisa Susan Karen "
    "Nancy Anna Alice Emma Julia Jane Barbara"
)
MEN = _words(
    "John Michael David James Robert Daniel Matthew Andrew Joseph William Thomas Richard Charles "
    "Paul Mark Peter George Henry Frank Steven"
)
DEGREES = _words("really very truly")
ADJECTIVES = _words("great good kind wonderful clever")
FRIENDS = _words("friend person student teacher colleague neighbor")
