"""Which language is spoken, and which one is written: of what is translated, the text is English."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from whisper_tuner.errors import ConfigError

UNSPACED = frozenset({"zh", "yue", "ja", "th", "lo", "my", "km", "bo"})  # languages written without spaces

# Codes that others write for Whisper's own: of ISO 639-2 and 639-3, of single languages of a group, and older ones.
_CODES = """
    af=afr am=amh ar=ara,arb as=asm az=aze,azj ba=bak be=bel bg=bul bn=ben bo=bod,tib br=bre bs=bos ca=cat
    cs=ces,cze cy=cym,wel da=dan de=deu,ger el=ell,gre en=eng es=spa et=est,ekk eu=eus,baq fa=fas,per,pes fi=fin
    fo=fao fr=fra,fre gl=glg gu=guj ha=hau he=heb,iw hi=hin hr=hrv ht=hat hu=hun hy=hye,arm id=ind,in is=isl,ice
    it=ita ja=jpn jw=jv,jav ka=kat,geo kk=kaz km=khm kn=kan ko=kor la=lat lb=ltz ln=lin lo=lao lt=lit lv=lav,lvs
    mg=mlg,plt mi=mri,mao mk=mkd,mac ml=mal mn=mon,khk mr=mar ms=msa,may,zsm mt=mlt my=mya,bur ne=nep,npi
    nl=nld,dut nn=nno no=nor,nob,nb oc=oci pa=pan pl=pol ps=pus,pbu pt=por ro=ron,rum,mo,mol ru=rus sa=san sd=snd
    si=sin sk=slk,slo sl=slv sn=sna so=som sq=sqi,alb,als sr=srp su=sun sv=swe sw=swa,swh ta=tam te=tel tg=tgk
    th=tha tk=tuk tl=tgl,fil tr=tur tt=tat uk=ukr ur=urd uz=uzb,uzn vi=vie yi=yid,ydd,ji yo=yor zh=zho,chi,cmn
"""
CODES = {other: group[:2] for group in _CODES.split() for other in group[3:].split(",")}
GROUPS = {"zh": {"zh", "yue"}, "no": {"no", "nn"}}  # codes of groups, and the languages of them that Whisper knows
REGIONS = {"chn", "twn", "hkg", "mac", "sgp", "mys"}  # of Chinese; that of Norwegian, nor, is also its language
NAMES = {"farsi": "fa", "filipino": "tl", "chinese cantonese": "yue", "norwegian nynorsk": "nn"}
# Kinds of languages: Whisper has no codes for these.
KINDS = r"\b(american|bokm[aå]l|brazilian|british|canadian|european|mandarin|modern|simplified|standard|traditional)\b"
TAG = re.compile(r"([a-z]{2,3})((?:[-_][a-z0-9]{2,8})*)(?:\.[\w-]+)?(?:@\w+)?")  # fr, fr-FR, zh_Hans_CN, fr_FR.UTF-8


@functools.cache  # called for each row
def language_code(language: str | None) -> str:
    """Return Whisper's code: `fr` for `<|fr|>`, `fr-CA`, `fra`, `French` or `Canadian French`. Raises ConfigError."""
    # Half a second to import; what needs a language alone must not wait for torch as well.
    from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

    plain = (language or "").strip().strip("<|>").lower()
    if tag := TAG.fullmatch(plain):
        code = CODES.get(tag[1], tag[1])
        # Behind the name of a group three letters are one of its languages, as in zh-yue; else they are a region.
        third = next((part for part in re.split("[-_]", tag[2]) if len(part) == 3 and part.isalpha()), "")
        if code in GROUPS and third and third not in REGIONS:
            member = CODES.get(third, third)
            code = member if member in GROUPS[code] else ""
    else:
        known, outside = TO_LANGUAGE_CODE | NAMES, re.sub(r"\(.*?\)", "", plain)  # without what is in brackets
        texts = (plain, re.sub(KINDS, "", plain), outside, re.sub(KINDS, "", outside))
        spelled = (" ".join(re.findall(r"[^\W\d_]+", text)) for text in texts)
        code = next((known[name] for name in spelled if name in known), "")
    if code not in LANGUAGES:
        what = f"unknown language '{language}'" if plain else "a multilingual Whisper needs a language"
        raise ConfigError(what, remedy="Write a language's code, locale or English name, such as fr, fr-CA or French.")
    return code


def text_language(spoken: str | None, task: str) -> str | None:
    """The code of the language that is written: for labels, references and what a model writes.

    `spoken` is the code of the speech's, None if a model is to find it out. Whisper translates into English alone.
    """
    return "en" if task == "translate" else spoken


def joined(pieces: Iterable[str], language: str | None) -> str:
    """One text of its pieces, as its language (a code) is written."""
    return ("" if language in UNSPACED else " ").join(filter(None, pieces))
