package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox"
)

// faults are what a memoryStore does wrong. Nothing, by default.
type faults struct {
	key     func(inbox.Key) inbox.Key                                     // what becomes of keys
	outputs func([]*message.Message) []*message.Message                   // what becomes of outputs
	shown   func(record *inbox.Record, claim inbox.Claim)                 // what becomes of records
	stored  func(claim inbox.Claim) error                                 // what else a commit takes offence at
	age     func(row *memoryRow) time.Duration                            // how old a record is thought to be
	marks   func(marked []inbox.Key, key inbox.Key) bool                  // whose outputs are marked
	forgets func(forgotten inbox.Key, key inbox.Key) bool                 // what is forgotten
	batch   func(limit, deleted int) (newLimit, count int)                // what becomes of a limit, and of the count
	mood    func(err error) bool                                          // what is transient
	begins  func(ctx context.Context, claim *inbox.Claim) context.Context // what becomes of Begin's arguments

	checksFirst        bool // claims what others hold
	runsDuplicates     bool // gives no records
	waitsForever       bool
	holdsUpOthers      bool // while somebody waits
	assumesCommits     bool // of whom it waits for
	hidesEnds          bool // of contexts, that is
	keepsEffects       bool // of what was rolled back
	keepsClaims        bool // of what was rolled back
	keepsLateRollbacks bool // does not roll back if the context ended
	keepsKilled        bool // keeps claims of killed connections
	undoesCommits      bool // by a rollback afterwards
	shows              bool // effects before the commit
	failsTwice         bool // Rollback, after the end
	zombies            bool // natives live on
	tied               bool // transactions to Begin's context
	commitsKilled      bool // reports success
	commitsUndone      bool // reports success
	neverLost          bool // ConnectionLost
	alwaysLost         bool // ConnectionLost
	commitsHalf        bool // the claim, if the context ended
	tearsCommits       bool // keeps effects if the context ends meanwhile
	interrupts         bool // a failing write undoes the ones before it
	meddles            bool // with the session's setting
	aliases            bool // keeps the messages that it is given
	keepsFailedOutputs bool // for the next record of the key
	keepsOutputs       bool // of forgotten keys, likewise
	deletesPending     bool
	deletesHeld        bool
	deletesAfterClaims bool // waits for all of them
	alone              bool // another store has another table
	mixesTables        bool
	createsOnce        bool // fails if the schema is being created
	createsAnew        bool // empties tables
	leaksConnections   bool
	leaksGoroutines    chan struct{} // until it is closed
}

// memory is a database in memory.
type memory struct {
	mu          sync.Mutex
	changed     *sync.Cond
	tables      map[string]map[inbox.Key]*memoryRow // nil: not created
	creating    map[string]bool
	effects     []string
	outputs     map[inbox.Key][]*message.Message // kept beside the records
	waiting     int
	inUse       int
	lockTimeout time.Duration
	latency     time.Duration // of each statement
}

type memoryRow struct {
	owner  *memoryTx // while it is not committed
	record inbox.Record
}

// memoryStore is a store on it.
type memoryStore struct {
	faults
	db    *memory
	table string
}

func newMemoryStore() *memoryStore {
	db := &memory{tables: map[string]map[inbox.Key]*memoryRow{"inbox": {}}, creating: map[string]bool{}, lockTimeout: time.Minute}
	db.outputs = map[inbox.Key][]*message.Message{}
	db.changed = sync.NewCond(&db.mu)
	return &memoryStore{db: db, table: "inbox"}
}

func (s *memoryStore) on(table string) *memoryStore {
	return &memoryStore{faults: s.faults, db: s.db, table: table}
}

var errMemoryConflict = errors.New("memory: conflict")

func (s *memoryStore) harness() *Harness {
	return &Harness{
		Store: s,
		Write: func(ctx context.Context, native any, effect string) error {
			return native.(*memoryTx).write(ctx, effect)
		},
		Effects: func(context.Context) ([]string, error) {
			s.db.mu.Lock()
			defer s.db.mu.Unlock()
			return slices.Clone(s.db.effects), nil
		},
		Another: func() (inbox.Store, error) {
			if s.alone {
				return newMemoryStore(), nil
			}
			return s.on(s.table), nil
		},
		OnNewTable: func() (inbox.Store, error) {
			if s.mixesTables {
				return s, nil
			}
			return s.on("another"), nil
		},
		Kill: func(_ context.Context, native any) error {
			native.(*memoryTx).lose(true)
			return nil
		},
		Undo: func(_ context.Context, native any) error {
			native.(*memoryTx).lose(false)
			return nil
		},
		LockTimeout: func(_ context.Context, native any) (string, error) {
			if tx, ok := native.(*memoryTx); ok && s.meddles {
				return tx.claim.LockTimeout.String(), nil
			}
			return s.db.lockTimeout.String(), nil
		},
		Transient: errMemoryConflict,
		InUse: func() int {
			s.db.mu.Lock()
			defer s.db.mu.Unlock()
			return s.db.inUse
		},
		CloseIdle: func() {},
		Baseline: func(_ context.Context, effect string) error {
			s.db.mu.Lock()
			defer s.db.mu.Unlock()
			s.db.effects = append(s.db.effects, effect)
			return nil
		},
	}
}

type memoryTx struct {
	store   *memoryStore
	key     inbox.Key
	claim   inbox.Claim
	ctx     context.Context
	began   time.Time
	record  *inbox.Record
	effects []string
	ended   bool
	killed  bool
	undone  bool // behind the store's back
}

// rows returns the table. The lock is held.
func (s *memoryStore) rows() (map[inbox.Key]*memoryRow, error) {
	rows := s.db.tables[s.table]
	if rows == nil {
		return nil, fmt.Errorf("memory: no table %q", s.table)
	}
	return rows, nil
}

// pause takes the time of a statement.
func (s *memoryStore) pause(ctx context.Context) {
	if s.db.latency > 0 {
		select {
		case <-ctx.Done():
		case <-time.After(s.db.latency):
		}
	}
}

func (s *memoryStore) Begin(ctx context.Context, claim inbox.Claim) (inbox.Tx, error) {
	if s.begins != nil {
		ctx = s.begins(ctx, &claim)
	}
	if s.leaksGoroutines != nil {
		go func() { <-s.leaksGoroutines }()
	}
	s.pause(ctx)
	s.db.mu.Lock()
	defer s.db.mu.Unlock()
	rows, err := s.rows()
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, s.db.changed.Broadcast)
	defer stop()
	timer := time.AfterFunc(claim.LockTimeout, s.db.changed.Broadcast)
	defer timer.Stop()
	tx := &memoryTx{store: s, key: claim.Key, claim: claim, ctx: ctx, began: time.Now()}
	if s.key != nil {
		tx.key = s.key(claim.Key)
	}
	for waits := false; ; waits = true {
		if ctx.Err() != nil {
			if s.hidesEnds && waits {
				return nil, errors.New("begin: the connection was closed")
			}
			return nil, fmt.Errorf("begin: %w", ctx.Err())
		}
		row := rows[tx.key]
		switch {
		case s.holdsUpOthers && s.db.waiting > 0 && !waits:
		case row == nil && waits && s.assumesCommits:
			tx.record, tx.ended = &inbox.Record{ReceivedAt: tx.began, ProcessedAt: time.Now()}, true
			return tx, nil
		case row == nil, row.owner != nil && s.checksFirst, row.owner == nil && s.runsDuplicates:
			rows[tx.key] = &memoryRow{owner: tx}
			s.db.inUse++
			return tx, nil
		case row.owner == nil:
			record := row.record
			record.Fingerprint = bytes.Clone(record.Fingerprint)
			record.Outputs = s.copies(record.Outputs)
			if s.shown != nil {
				s.shown(&record, claim)
			}
			tx.record, tx.ended = &record, true
			if s.leaksConnections {
				s.db.inUse++
			}
			return tx, nil
		}
		if time.Since(tx.began) >= claim.LockTimeout && !s.waitsForever {
			return nil, fmt.Errorf("begin: %w", inbox.ErrInFlight)
		}
		s.db.waiting++
		s.db.changed.Wait()
		s.db.waiting--
	}
}

func (s *memoryStore) copies(msgs []*message.Message) []*message.Message {
	if s.aliases {
		return msgs
	}
	var kept []*message.Message
	for _, msg := range msgs {
		fresh := message.NewMessage(msg.UUID, bytes.Clone(msg.Payload))
		maps.Copy(fresh.Metadata, msg.Metadata)
		kept = append(kept, fresh)
	}
	return kept
}

func (tx *memoryTx) Recorded() *inbox.Record { return tx.record }
func (tx *memoryTx) Native() any             { return tx }

func (tx *memoryTx) write(ctx context.Context, effect string) error {
	tx.store.pause(ctx)
	db := tx.store.db
	db.mu.Lock()
	defer db.mu.Unlock()
	switch {
	case tx.ended && !tx.store.zombies, tx.killed:
		return errors.New("write: the transaction is over")
	case ctx.Err() != nil:
		if tx.store.interrupts {
			tx.effects = nil
		}
		return fmt.Errorf("write: %w", ctx.Err())
	case tx.store.shows, tx.ended:
		db.effects = append(db.effects, effect)
	default:
		tx.effects = append(tx.effects, effect)
	}
	return nil
}

// lose undoes the transaction on the server's side.
func (tx *memoryTx) lose(killed bool) {
	db := tx.store.db
	db.mu.Lock()
	defer db.mu.Unlock()
	tx.killed, tx.undone = killed, !killed
	tx.effects = nil
	if !killed || !tx.store.keepsKilled {
		tx.release()
	}
}

// release gives the claim up, if it is still there. The lock is held.
func (tx *memoryTx) release() {
	rows, _ := tx.store.rows()
	if row := rows[tx.key]; row != nil && row.owner == tx {
		delete(rows, tx.key)
	}
	tx.store.db.changed.Broadcast()
}

// end gives the connection back. The lock is held.
func (tx *memoryTx) end() {
	tx.ended = true
	tx.store.db.inUse--
	tx.store.db.changed.Broadcast()
}

// undo rolls back. The lock is held.
func (tx *memoryTx) undo() {
	s := tx.store
	switch {
	case s.keepsClaims:
		s.db.tables[s.table][tx.key] = &memoryRow{}
	case !tx.killed || !s.keepsKilled:
		tx.release()
	}
	if s.keepsEffects {
		s.db.effects = append(s.db.effects, tx.effects...)
	}
	tx.end()
}

func (tx *memoryTx) Commit(ctx context.Context, outputs []*message.Message) error {
	s := tx.store
	s.db.mu.Lock()
	defer s.db.mu.Unlock()
	if s.keepsFailedOutputs {
		s.db.outputs[tx.key] = append(s.db.outputs[tx.key], s.copies(outputs)...)
	}
	switch {
	case tx.ended:
		return errors.New("commit: the transaction is over")
	case tx.killed && !s.commitsKilled, tx.undone && !s.commitsUndone:
		tx.undo()
		return errors.New("commit: the transaction was lost")
	case s.tied && tx.ctx.Err() != nil:
		tx.undo()
		return fmt.Errorf("commit: %w", tx.ctx.Err())
	case ctx.Err() != nil && !s.commitsHalf:
		tx.undo()
		return fmt.Errorf("commit: %w", ctx.Err())
	}
	if s.stored != nil {
		if err := s.stored(tx.claim); err != nil {
			tx.undo()
			return err
		}
	}
	if s.tearsCommits {
		s.db.effects = append(s.db.effects, tx.effects...)
		tx.effects = nil
	}
	s.db.mu.Unlock()
	s.pause(ctx)
	s.db.mu.Lock()
	ended := ctx.Err() // once, since it may end at any moment, and the commit is not to be torn
	if ended != nil && !s.commitsHalf {
		tx.undo()
		return fmt.Errorf("commit: %w", ended)
	}
	kept := s.copies(outputs)
	if s.outputs != nil {
		kept = s.outputs(kept)
	}
	if s.keepsOutputs {
		s.db.outputs[tx.key] = append(s.db.outputs[tx.key], kept...)
	}
	if s.keepsOutputs || s.keepsFailedOutputs {
		kept = s.db.outputs[tx.key]
	}
	if s.keepsFailedOutputs {
		delete(s.db.outputs, tx.key)
	}
	rows, _ := s.rows()
	rows[tx.key] = &memoryRow{record: inbox.Record{
		ReceivedAt: tx.began, ProcessedAt: time.Now(), Fingerprint: bytes.Clone(tx.claim.Fingerprint), Outputs: kept,
	}}
	if ended == nil {
		s.db.effects = append(s.db.effects, tx.effects...)
	}
	tx.end()
	return nil
}

func (tx *memoryTx) Rollback(ctx context.Context) error {
	s := tx.store
	s.db.mu.Lock()
	defer s.db.mu.Unlock()
	switch {
	case !tx.ended && ctx.Err() != nil && s.keepsLateRollbacks:
		tx.end()
	case !tx.ended:
		tx.undo()
	case tx.record == nil && s.failsTwice:
		return errors.New("rollback: the transaction is over")
	case tx.record == nil && s.undoesCommits:
		delete(s.db.tables[s.table], tx.key)
	}
	return nil
}

func (tx *memoryTx) ConnectionLost() bool {
	return tx.killed && !tx.store.neverLost || tx.store.alwaysLost
}

func (s *memoryStore) IsTransient(err error) bool {
	if s.mood != nil {
		return s.mood(err)
	}
	return errors.Is(err, errMemoryConflict) && !errors.Is(err, inbox.ErrInFlight)
}

func (s *memoryStore) InitializeSchema(ctx context.Context) error {
	s.db.mu.Lock()
	defer s.db.mu.Unlock()
	if s.db.creating[s.table] && s.createsOnce {
		return errors.New("create table: it is there already")
	}
	s.db.creating[s.table] = true
	s.db.mu.Unlock()
	s.pause(ctx)
	s.db.mu.Lock()
	s.db.creating[s.table] = false
	if s.db.tables[s.table] == nil || s.createsAnew {
		s.db.tables[s.table] = map[inbox.Key]*memoryRow{}
	}
	return nil
}

func (s *memoryStore) MarkOutputsPublished(_ context.Context, keys []inbox.Key) error {
	s.db.mu.Lock()
	defer s.db.mu.Unlock()
	marks := slices.Contains[[]inbox.Key]
	if s.marks != nil {
		marks = s.marks
	}
	for key, row := range s.db.tables[s.table] {
		if marks(keys, key) {
			row.record.Outputs = nil
		}
	}
	return nil
}

func (s *memoryStore) DeleteExpired(ctx context.Context, age time.Duration, limit int) (int, error) {
	if age < 0 {
		return 0, errors.New("delete: the age is negative")
	}
	s.pause(ctx)
	s.db.mu.Lock()
	defer s.db.mu.Unlock()
	stop := context.AfterFunc(ctx, s.db.changed.Broadcast)
	defer stop()
	held := func(row *memoryRow) bool { return row.owner != nil }
	for s.deletesAfterClaims && slices.ContainsFunc(slices.Collect(maps.Values(s.db.tables[s.table])), held) {
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
		s.db.changed.Wait()
	}
	newLimit, deleted := limit, 0
	if s.batch != nil {
		newLimit, _ = s.batch(limit, 0)
	}
	for key, row := range s.db.tables[s.table] {
		if deleted == newLimit {
			break
		}
		old := time.Since(row.record.ProcessedAt)
		if s.age != nil {
			old = s.age(row)
		}
		if (!held(row) || s.deletesHeld) && old >= age && (len(row.record.Outputs) == 0 || s.deletesPending) {
			delete(s.db.tables[s.table], key)
			deleted++
		}
	}
	if s.batch != nil {
		_, deleted = s.batch(limit, deleted)
	}
	return deleted, nil
}

func (s *memoryStore) Forget(_ context.Context, key inbox.Key) error {
	stored, err := key.Normalize()
	if err != nil {
		return err
	}
	s.db.mu.Lock()
	defer s.db.mu.Unlock()
	forgets := func(forgotten, key inbox.Key) bool { return forgotten == key }
	if s.forgets != nil {
		forgets, stored = s.forgets, key
	}
	maps.DeleteFunc(s.db.tables[s.table], func(key inbox.Key, _ *memoryRow) bool { return forgets(stored, key) })
	return nil
}
