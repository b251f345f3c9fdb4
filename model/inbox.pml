/*
 * One message, from the broker through the inbox to the database and on to the next topic.
 *
 * Each step is atomic, and between any two of them everything else may happen. README.md says what is modelled, and what
 * the definitions that break the model on purpose (the mutants) stand for.
 */

#ifndef CONSUMERS
#define CONSUMERS 2 /* processes that compete for the message */
#endif
#ifndef COPIES
#define COPIES 2 /* times that the producer published it */
#endif
#ifndef FAULTS
#define FAULTS 4 /* in one run, of all kinds together; without a bound, nothing would have to happen eventually */
#endif
#define NOBODY CONSUMERS

/* The broker. */
byte unsettled = COPIES;       /* copies that the broker still has */
byte queued = COPIES;          /* those of them that wait for a consumer */
bool delivered[CONSUMERS];     /* the consumer has a copy */
bool stale[CONSUMERS];         /* that copy was queued again meanwhile: its ack has no effect */
bool acked;                    /* a consumer acked, whether or not the broker got to know */

/* What is committed in the database. */
bool row;                      /* the inbox has a row for the message */
byte recorded;                 /* UUID of the output that the row holds; 0: none */
bool marked;                   /* that output is marked as published */
byte effects;                  /* times that the handler's effect was committed */

/* What is not: a transaction per consumer. */
mtype = { Closed, Open, Committing, Committed, Orphaned, OrphanedCommit };
mtype session[CONSUMERS] = Closed;
byte holder = NOBODY;          /* whose transaction has inserted the row */
byte made[CONSUMERS];          /* UUID of the output that the handler returned in it */

/* What went to the next topic. */
byte published;                /* UUID of the first output; 0: none */
bool otherUUID;                /* and then one with another UUID */

byte runs;                     /* of the handler; each makes an output with a UUID of its own */
byte faults = FAULTS;

#define FAULT faults > 0 -> faults--

inline publish(uuid) {
	if
	:: published == 0 -> published = uuid
	:: published != 0 && published != uuid -> otherUUID = true
	:: else
	fi
}

inline rollback(c) {
	if
	:: holder == c -> holder = NOBODY
	:: else
	fi;
	made[c] = 0
}

inline commit(c) {
	row = true;
#ifndef EFFECT_OUTSIDE_TX
	effects++;
#endif
#ifndef NO_RECORDED_OUTPUTS
	recorded = made[c];
#endif
	rollback(c) /* of nothing: the claim is free, the rest is stored */
}

/* What the server sees of a client that is gone, or that it cannot reach any more. */
inline orphan(c) {
	if
	:: session[c] == Open -> session[c] = Orphaned
	:: session[c] == Committing -> session[c] = OrphanedCommit
	:: session[c] == Committed -> session[c] = Closed
	:: else
	fi
}

/* The copy goes back to the queue, unless it is there. */
inline requeue(c) {
	if
	:: !stale[c] -> queued++
	:: else
	fi;
	delivered[c] = false;
	stale[c] = false
}

proctype Consumer(byte c) {
	byte out; /* UUID of the output to publish; 0: none */

end_receive:
	atomic { queued > 0 -> queued--; delivered[c] = true; out = 0 };

#ifdef ACK_BEFORE_COMMIT
	acked = true;
#endif

	if /* BEGIN and claim */
	:: atomic { row -> out = (marked -> 0 : recorded);
#ifdef FRESH_UUIDS
		runs++; out = runs;
#endif
#ifdef NACK_DUPLICATES
		goto nack;
#endif
		goto handed_out }
#ifdef CHECK_THEN_INSERT
	:: atomic { !row && session[c] == Closed -> session[c] = Open }
#else
	:: atomic { !row && holder == NOBODY -> holder = c; session[c] = Open;
#ifdef CLAIM_OUTSIDE_TX
		row = true;
#endif
		}
#endif
#ifdef SKIP_IN_FLIGHT
	:: atomic { !row && holder != NOBODY -> goto handed_out }
#else
	:: atomic { !row && holder != NOBODY -> goto nack } /* waited for LockTimeout */
#endif
	:: atomic { FAULT; goto crash }
	:: atomic { FAULT; goto nack } /* no connection */
	fi;

	if /* the handler */
	:: atomic { runs++; made[c] = runs;
#ifdef EFFECT_OUTSIDE_TX
		effects++;
#endif
#ifdef PUBLISH_IN_HANDLER
		publish(runs);
#endif
		}
	:: atomic { FAULT; rollback(c); session[c] = Closed; goto nack } /* an error, a panic */
	:: atomic { FAULT; orphan(c); goto nack } /* the connection broke */
	:: atomic { FAULT; orphan(c); goto crash }
	fi;

	if /* COMMIT is sent */
	:: session[c] = Committing
	:: atomic { FAULT; orphan(c); goto nack }
	:: atomic { FAULT; orphan(c); goto crash }
	fi;

	if /* and answered */
	:: atomic { session[c] == Committed -> session[c] = Closed }
#ifdef COMMIT_ERROR_IGNORED
	:: atomic { FAULT; orphan(c) }
#else
	:: atomic { FAULT; orphan(c); goto nack } /* or not: the outcome is unknown */
#endif
	:: atomic { FAULT; orphan(c); goto crash }
	fi;
#ifdef NO_RECORDED_OUTPUTS
	out = runs;
#else
	out = recorded;
#endif

handed_out:
#ifdef MARK_BEFORE_PUBLISH
	marked = true;
#endif
	if
	:: out != 0 ->
		if /* the router publishes */
		:: atomic { publish(out) }
		:: atomic { FAULT; goto nack }
		:: atomic { FAULT; publish(out); goto nack } /* the broker has it, and its answer is lost */
		:: atomic { FAULT; goto crash }
		fi
	:: else
	fi;

	if /* and acks */
	:: atomic { acked = true;
		if
		:: !stale[c] -> unsettled--
		:: else
		fi;
		delivered[c] = false; stale[c] = false }
	:: atomic { FAULT; acked = true; requeue(c) } /* the ack is lost */
	:: atomic { FAULT; goto crash }
	fi;

	if
	:: out != 0 ->
		if /* the outputs are marked as published */
		:: marked = true
		:: atomic { FAULT } /* or not: the consumer crashed, or the statement failed */
		fi
	:: else
	fi;
	goto end_receive;

nack:
	atomic { requeue(c); goto end_receive };

crash:
	/* The broker sees the connection closed and queues the copy again. A new process takes the consumer's place. */
	atomic { requeue(c); goto end_receive }
}

/*
 * The server's end of that consumer's connections: it commits what it is asked to, and undoes what a client left behind,
 * in its own time.
 */
proctype Server(byte c) {
end_serve:
	do
	:: atomic { session[c] == Committing -> commit(c); session[c] = Committed }
	:: atomic { session[c] == Orphaned -> rollback(c); session[c] = Closed }
	:: atomic { session[c] == OrphanedCommit -> commit(c); session[c] = Closed } /* the COMMIT had arrived */
	:: atomic { session[c] == OrphanedCommit -> rollback(c); session[c] = Closed } /* it had not */
	od
}

/*
 * The broker may deliver a copy again although its consumer still works on it: an ack deadline that passed. Nothing obliges
 * it to, so the process may end at any time.
 */
proctype Broker(byte c) {
	do
	:: atomic { delivered[c] && !stale[c] && faults > 0 -> faults--; stale[c] = true; queued++ }
	:: break
	od
}

init {
	byte c;
	atomic {
		for (c : 0 .. CONSUMERS - 1) {
			run Consumer(c);
			run Server(c);
			run Broker(c)
		}
	}
}

/* What has to hold. The name of each is the name that the test and README.md use. */
ltl effect_at_most_once     { [] (effects <= 1) }
ltl effect_eventually_once  { <> (effects == 1) }
ltl no_ack_before_commit    { [] (acked -> effects > 0) }
ltl output_eventually       { [] (effects > 0 -> <> (published != 0)) }
ltl output_has_one_uuid     { [] !otherUUID }
ltl no_output_before_commit { [] (published != 0 -> effects > 0) }
ltl queue_empties           { <> [] (unsettled == 0) }
