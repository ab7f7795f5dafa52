/* Handoffs, claims and leases between prefill and decode engines, as kvplan.protocol has them, for spin.

   Each prefill engine has one block of two halves, and so has each decode engine. A half holds a label: the number of
   the request whose bytes it has, 0 for nobody's. To read a half copies the label that is there at that moment,
   whoever owns the block by then. No rule compares clocks, so whatever a timer ends may end at any time. Messages are
   lost, and overtake each other where there is a place for two, and prefill dies and comes back under its name. Any decode engine may get any handoff,
   also one that was read before.

   What becomes of an exported and of an imported request is looked up in the tables of exporter.py and importer.py:
   transitions.pml is generated from them, and an event that a table does not have is an error.

   A comment names the rule of leases.py (L), claims.py (C) or reads.py (R) that a line stands for. FAULT takes one
   rule away, and spin has to find what comes of it. */

#ifndef PREFILLS
#define PREFILLS 2
#endif
#ifndef DECODES
#define DECODES 2
#endif
#ifndef REQUESTS
#define REQUESTS 2  /* that all prefill engines compute together */
#endif
#ifndef READS
#define READS 2  /* of each decode engine */
#endif
#ifndef DEATHS
#define DEATHS 1  /* of all prefill engines together */
#endif

#ifndef PLACES
#define PLACES 1  /* of messages under way to an engine: with two of them, the later one may come first */
#endif

#define UNASKED 1  /* a read is right without a last question: read.R4 is gone */
#define EARLY 2  /* the last question is asked before the last byte: read.R4 is gone */
#define STALE 3  /* the answer to an earlier question counts for the last one: read.R4 is gone */
#define REVIVED 4  /* a claim brings a lease back that has ended: lease.L3 is gone */
#define SAME_START 5  /* a start takes the leases of the one before for its own: lease.L3 is gone */
#define REAPED 6  /* a timer frees a block that a claim holds: lease.L1 is gone */
#define REUSED 7  /* decode frees a block while bytes may land in it: read.R2 is gone */
#define VACUOUS 8  /* no fault: shows that some read is right at all */
#ifndef FAULT
#define FAULT 0
#endif

#include "transitions.pml"

mtype = { claim, end, ask };

typedef Block { byte half[2] };
Block prefill_block[PREFILLS];
Block decode_block[DECODES];
byte owner[DECODES];  /* the request that may write into the block of a decode engine */

/* What the request in the block of each engine is. */
byte exported[PREFILLS] = EXPORT_FREE;
byte imported[DECODES] = IMPORT_ENDED;

inline move_export(event) {
    exported[p] = AFTER_EXPORT(exported[p], event);
    assert(exported[p] != NOTHING)
}

inline move_import(event) {
    imported[d] = AFTER_IMPORT(imported[d], event);
    assert(imported[d] != NOTHING)
}

/* Of each request: the engine that computed it, and in which of its starts. */
byte source[REQUESTS + 1];
byte computed_in[REQUESTS + 1];
bool is_lent[REQUESTS + 1];  /* there is a handoff, for whoever gets it */
byte num_requests, num_deaths;
byte start[PREFILLS];

/* The lease of each engine: its request (0: none), whether its first time lasts, and a bit for each claim on it. */
byte lent[PREFILLS];
bool lasts[PREFILLS];
byte claims[PREFILLS];

/* A message to prefill: its kind, request, start, reader, and the number of the question, which an answer repeats. */
chan to_prefill[PREFILLS] = [PLACES] of { mtype, byte, byte, byte, byte };
chan to_decode[DECODES] = [1] of { byte, bool };

/* lease.L3: a lease that has ended stays ended, and all leases have ended when the engine starts again. */
#define STANDS(p, request, at) (lent[p] == request && (at == start[p] || FAULT == SAME_START))

proctype Prefill(byte p) {
    mtype kind;
    byte request, at, reader, question;
end_of_prefill:
    do
    /* A request is computed in a free block, one half after the other, and lent. */
    :: atomic {
           exported[p] == EXPORT_FREE && num_requests < REQUESTS -> num_requests++;
           request = num_requests;
           exported[p] = EXPORT_COMPUTING
       };
       prefill_block[p].half[0] = request;
       atomic {
           prefill_block[p].half[1] = request;
           move_export(EXPORT_FINISH);
           source[request] = p;
           computed_in[request] = start[p];
           lent[p] = request;
           lasts[p] = true;
           is_lent[request] = true;
           request = 0
       }
    /* lease.L1 and lease.L2: claims are taken, renewed and ended, and questions are answered. An answer may be lost. */
    :: atomic {
           to_prefill[p] ? kind, request, at, reader, question;
           if
           :: kind == claim && STANDS(p, request, at) -> claims[p] = claims[p] | (1 << reader)
           :: kind == claim && FAULT == REVIVED && lent[p] == 0 && at == start[p] ->
              lent[p] = request;
              exported[p] = EXPORT_PINNED;
              claims[p] = 1 << reader
           :: kind == end && STANDS(p, request, at) ->
              claims[p] = claims[p] & ~(1 << reader);
              lasts[p] = false
           :: kind == ask && nfull(to_decode[reader]) -> to_decode[reader] ! question, STANDS(p, request, at)
           :: kind == ask
           :: kind != ask && !STANDS(p, request, at)
           fi;
           request = 0; at = 0; reader = 0; question = 0
       }
    /* A message overtakes the one before it. */
    :: atomic {
           len(to_prefill[p]) > 1 ->
           to_prefill[p] ? kind, request, at, reader, question;
           to_prefill[p] ! kind, request, at, reader, question;
           request = 0; at = 0; reader = 0; question = 0
       }
    /* Timers end the first time of a lease, and claims that were not renewed. */
    :: atomic { lasts[p] -> lasts[p] = false }
    :: atomic { claims[p] -> claims[p] = 0 }
    /* The scheduler frees a block when its lease has ended, and computes another request in it. */
    :: atomic { lent[p] && !lasts[p] && !claims[p] -> move_export(EXPORT_LEASE_ENDED); lent[p] = 0 }
    :: atomic { FAULT == REAPED && lent[p] && claims[p] && !lasts[p] -> prefill_block[p].half[1] = 0 }
    /* The engine dies and starts again, with nobody's bytes in its block. */
    :: atomic {
           num_deaths < DEATHS -> num_deaths++;
           start[p]++;
           if
           :: FAULT == SAME_START
           :: else -> lent[p] = 0; exported[p] = EXPORT_FREE
           fi;
           lasts[p] = false;
           claims[p] = 0;
           prefill_block[p].half[0] = 0;
           prefill_block[p].half[1] = 0
       }
    od
}

/* A message is sent, or lost. */
inline send(kind, number) {
    if
    :: nfull(to_prefill[source[request]]) ->
       to_prefill[source[request]] ! kind, request, computed_in[request], d, number
    :: true
    fi
}

/* Questions are numbered through all reads of an engine, so that the answer to one never counts for another. */
#define EARLY_QUESTION (2 * num_reads - 1)
#define LAST_QUESTION (2 * num_reads)

/* The bytes of one half land. They must not land in a block that somebody else has by then. */
inline land(nth) {
    assert(owner[d] == request && (imported[d] == IMPORT_READING || imported[d] == IMPORT_ENDING));
    decode_block[d].half[nth] = prefill_block[source[request]].half[nth]
}

proctype Decode(byte d) {
    byte request, num_reads, answered;
    bool is_right, has_asked;
    do
    :: num_reads < READS ->
       /* claim.C1: a handoff is claimed when it arrives. */
       atomic {
           num_reads++;
           select(request : 1 .. REQUESTS);
           is_lent[request];
           imported[d] = IMPORT_ASKING;
           move_import(IMPORT_PUBLISH);
           move_import(IMPORT_ALLOCATE);
           owner[d] = request;
           send(claim, 0)
       };
       atomic { land(0); move_import(IMPORT_LAST) };
       if
       :: FAULT == EARLY || FAULT == STALE -> atomic { send(ask, EARLY_QUESTION) }
       :: else
       fi;
       /* read.R2: a source may be silent for so long that the request has failed, and its bytes land afterwards. */
       if
       :: FAULT == REUSED -> atomic { move_import(IMPORT_END); owner[d] = 255 }
       :: true
       fi;
       atomic { land(1) };
       /* read.R4: the last byte has come, so the source is asked once more, and only that answer counts. */
       if
       :: FAULT == EARLY || FAULT == UNASKED
       :: else -> atomic { send(ask, LAST_QUESTION) }
       fi;
       is_right = (FAULT == UNASKED);
       do
       :: atomic {
              FAULT != UNASKED && nempty(to_decode[d]);
              to_decode[d] ? answered, is_right;
              is_right = is_right && (answered == LAST_QUESTION || FAULT == EARLY || FAULT == STALE)
          };
          if
          :: is_right || answered == LAST_QUESTION -> break
          :: else
          fi
       :: atomic { true -> is_right = is_right && (FAULT == UNASKED) }; break  /* no answer: the request fails */
       od;
       /* A request that is right attends to its own bytes. */
       assert(!is_right || FAULT != VACUOUS);
       assert(!is_right || (decode_block[d].half[0] == request && decode_block[d].half[1] == request));
       /* claim.C1: its claim ends, and its block is free. */
       atomic {
           send(end, 0);
           move_import(IMPORT_END);
           owner[d] = 0;
           request = 0;
           answered = 0;
           is_right = false;
           /* an answer that comes later is for nobody */
           do
           :: to_decode[d] ? _, _
           :: empty(to_decode[d]) -> break
           od
       }
    :: num_reads == READS -> break
    od
}

init {
    byte engine;
    atomic {
        for (engine : 0 .. PREFILLS - 1) { run Prefill(engine) }
        for (engine : 0 .. DECODES - 1) { run Decode(engine) }
    }
}
