"""Which language is spoken, and which one is written: of what is translated, the text is English."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from exogym.config import nearest
from whisper_tuner.errors import ConfigError

UNSPACED = frozenset({"zh", "yue", "ja", "th", "lo", "my", "km", "bo"})  # languages written without spaces

# Whisper's languages: its code, the English names, and codes that others write for it: of ISO 639-2 and 639-3, of
# single languages of a group, and older ones.
_CODES = """
    af=afrikaans,afr am=amharic,amh ar=arabic,ara,arb as=assamese,asm az=azerbaijani,aze,azj ba=bashkir,bak
    be=belarusian,bel bg=bulgarian,bul bn=bengali,ben bo=tibetan,bod,tib br=breton,bre bs=bosnian,bos
    ca=catalan,valencian,cat cs=czech,ces,cze cy=welsh,cym,wel da=danish,dan de=german,deu,ger el=greek,ell,gre
    en=english,eng es=spanish,castilian,spa et=estonian,est,ekk eu=basque,eus,baq fa=persian,fas,per,pes,farsi
    fi=finnish,fin fo=faroese,fao fr=french,fra,fre gl=galician,glg gu=gujarati,guj ha=hausa,hau haw=hawaiian
    he=hebrew,heb,iw hi=hindi,hin hr=croatian,hrv ht=haitian_creole,haitian,hat hu=hungarian,hun hy=armenian,hye,arm
    id=indonesian,ind,in is=icelandic,isl,ice it=italian,ita ja=japanese,jpn jw=javanese,jv,jav ka=georgian,kat,geo
    kk=kazakh,kaz km=khmer,khm kn=kannada,kan ko=korean,kor la=latin,lat lb=luxembourgish,letzeburgesch,ltz
    ln=lingala,lin lo=lao,lao lt=lithuanian,lit lv=latvian,lav,lvs mg=malagasy,mlg,plt mi=maori,mri,mao
    mk=macedonian,mkd,mac ml=malayalam,mal mn=mongolian,mon,khk mr=marathi,mar ms=malay,msa,may,zsm mt=maltese,mlt
    my=myanmar,burmese,mya,bur ne=nepali,nep,npi nl=dutch,flemish,nld,dut nn=nynorsk,nno,norwegian_nynorsk
    no=norwegian,nor,nob,nb oc=occitan,oci pa=punjabi,panjabi,pan pl=polish,pol ps=pashto,pushto,pus,pbu
    pt=portuguese,por ro=romanian,moldavian,moldovan,ron,rum,mo,mol ru=russian,rus sa=sanskrit,san sd=sindhi,snd
    si=sinhala,sinhalese,sin sk=slovak,slk,slo sl=slovenian,slv sn=shona,sna so=somali,som sq=albanian,sqi,alb,als
    sr=serbian,srp su=sundanese,sun sv=swedish,swe sw=swahili,swa,swh ta=tamil,tam te=telugu,tel tg=tajik,tgk
    th=thai,tha tk=turkmen,tuk tl=tagalog,tgl,fil,filipino tr=turkish,tur tt=tatar,tat uk=ukrainian,ukr ur=urdu,urd
    uz=uzbek,uzb,uzn vi=vietnamese,vie yi=yiddish,yid,ydd,ji yo=yoruba,yor yue=cantonese,chinese_cantonese
    zh=chinese,mandarin,zho,chi,cmn
"""
LANGUAGES = {group.partition("=")[0]: group.partition("=")[2].replace("_", " ").split(",") for group in _CODES.split()}
CODES = {other: code for code, others in LANGUAGES.items() for other in others}
GROUPS = {"zh": {"zh", "yue"}, "no": {"no", "nn"}}  # codes of groups, and the languages of them that Whisper knows
REGIONS = {"chn", "twn", "hkg", "mac", "sgp", "mys"}  # of Chinese; that of Norwegian, nor, is also its language
# Kinds of languages: Whisper has no codes for these.
KINDS = r"\b(american|bokm[aå]l|brazilian|british|canadian|european|mandarin|modern|simplified|standard|traditional)\b"
TAG = re.compile(r"([a-z]{2,3})((?:[-_][a-z0-9]{2,8})*)(?:\.[\w-]+)?(?:@\w+)?")  # fr, fr-FR, zh_Hans_CN, fr_FR.UTF-8


@functools.cache  # called for each row
def language_code(language: str | None) -> str:
    """Return Whisper's code: `fr` for `<|fr|>`, `fr-CA`, `fra`, `French` or `Canadian French`. Raises ConfigError."""
    plain = (language or "").strip().strip("<|>").lower()
    if tag := TAG.fullmatch(plain):
        code = CODES.get(tag[1], tag[1])
        # Behind the name of a group three letters are one of its languages, as in zh-yue; else they are a region.
        third = next((part for part in re.split("[-_]", tag[2]) if len(part) == 3 and part.isalpha()), "")
        if code in GROUPS and third and third not in REGIONS:
            member = CODES.get(third, third)
            code = member if member in GROUPS[code] else ""
    else:
        outside = re.sub(r"\(.*?\)", "", plain)  # without what is in brackets
        texts = (plain, re.sub(KINDS, "", plain), outside, re.sub(KINDS, "", outside))
        spelled = (" ".join(re.findall(r"[^\W_]+", text)) for text in texts)
        code = next((CODES[name] for name in spelled if name in CODES), "")
    if code not in LANGUAGES:
        near = nearest(plain, (name for name in CODES if len(name) > 3))
        missing = "the language of the speech is not given, and a multilingual Whisper is told it"
        what = f"unknown language '{language}'{near}" if plain else missing
        raise ConfigError(what, remedy="Write a language's code, locale or English name, such as fr, fr-CA or French.")
    return code


def language_name(code: str) -> str:
    """Return the English name of a language; of a code that Whisper does not know, the code."""
    return LANGUAGES.get(code, [code])[0].title()


def text_language(spoken: str | None, task: str) -> str | None:
    """The code of the language that is written: for labels, references and what a model writes.

    `spoken` is the code of the speech's, None if a model is to find it out. Whisper translates into English alone.
    """
    return "en" if task == "translate" else spoken


def joined(pieces: Iterable[str], language: str | None) -> str:
    """One text of its pieces, as its language (a code) is written."""
    return ("" if language in UNSPACED else " ").join(filter(None, pieces))
