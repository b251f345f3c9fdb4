package storetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox"
)

// memory is a table in memory.
type memory struct {
	mu      sync.Mutex
	changed *sync.Cond
	rows    map[inbox.Key]*memoryRow
	effects []string
	inUse   int
}

type memoryRow struct {
	owner  *memoryTx // while it is not committed
	record inbox.Record
}

// memoryStore is a store on it. Its fields plant faults.
type memoryStore struct {
	table *memory

	key      func(inbox.Key) inbox.Key // what becomes of keys
	outputs  func([]*message.Message) []*message.Message
	noWait   bool // claims whatever others hold
	unbound  bool // waits for ever
	deaf     bool // does not look at contexts
	keep     bool // keeps effects of what was rolled back
	stuck    bool // keeps claims of what was rolled back
	dirty    bool // effects are there before the commit
	strict   bool // Rollback fails after the end
	zombie   bool // natives live on
	tied     bool // transactions end with Begin's context
	forging  bool // reports success on killed connections
	leaking  bool // forgets to release
	anything bool // everything is transient
	young    bool // deletes what is too young
	greedy   bool // deletes unpublished outputs
	limitless,
	miscounting bool
	forgetful  bool // marks everything
	remembers  bool // Forget does nothing
	noPrint    bool // loses fingerprints
	zoned      bool // times are hours off
	picky      bool // refuses payloads that are not UTF-8
	halfCommit bool // commits the claim alone if the context ended
}

func newMemoryStore() *memoryStore {
	table := &memory{rows: map[inbox.Key]*memoryRow{}}
	table.changed = sync.NewCond(&table.mu)
	return &memoryStore{table: table}
}

func (s *memoryStore) harness() *Harness {
	return &Harness{
		Store: s,
		Write: func(_ context.Context, native any, effect string) error { return native.(*memoryTx).write(effect) },
		Effects: func(context.Context) ([]string, error) {
			s.table.mu.Lock()
			defer s.table.mu.Unlock()
			return slices.Clone(s.table.effects), nil
		},
		Another: func() (inbox.Store, error) {
			other := *s
			return &other, nil
		},
		Kill: func(_ context.Context, native any) error {
			native.(*memoryTx).kill()
			return nil
		},
		InUse: func() int {
			s.table.mu.Lock()
			defer s.table.mu.Unlock()
			return s.table.inUse
		},
	}
}

type memoryTx struct {
	store   *memoryStore
	key     inbox.Key
	claim   inbox.Claim
	record  *inbox.Record
	effects []string
	ended   bool
	killed  bool
	ctx     context.Context
}

func (s *memoryStore) Begin(ctx context.Context, claim inbox.Claim) (inbox.Tx, error) {
	t := s.table
	t.mu.Lock()
	defer t.mu.Unlock()
	stop := context.AfterFunc(ctx, t.changed.Broadcast)
	defer stop()
	deadline := time.Now().Add(claim.LockTimeout)
	timer := time.AfterFunc(claim.LockTimeout, t.changed.Broadcast)
	defer timer.Stop()

	key := claim.Key
	if s.key != nil {
		key = s.key(key)
	}
	tx := &memoryTx{store: s, key: key, claim: claim, ctx: ctx}
	for {
		if ctx.Err() != nil && !s.deaf {
			return nil, fmt.Errorf("begin: %w", ctx.Err())
		}
		row := t.rows[key]
		if row == nil || row.owner != nil && s.noWait {
			t.rows[key] = &memoryRow{owner: tx}
			t.inUse++
			return tx, nil
		}
		if row.owner == nil {
			record := row.record
			record.Outputs = copies(record.Outputs)
			tx.record, tx.ended = &record, true
			if s.leaking {
				t.inUse++
			}
			return tx, nil
		}
		if !time.Now().Before(deadline) && !s.unbound {
			return nil, fmt.Errorf("begin: %w", inbox.ErrInFlight)
		}
		t.changed.Wait()
	}
}

func copies(msgs []*message.Message) []*message.Message {
	var kept []*message.Message
	for _, msg := range msgs {
		fresh := message.NewMessage(msg.UUID, msg.Payload)
		for name, value := range msg.Metadata {
			fresh.Metadata[name] = value
		}
		kept = append(kept, fresh)
	}
	return kept
}

func (tx *memoryTx) Recorded() *inbox.Record { return tx.record }
func (tx *memoryTx) Native() any             { return tx }

func (tx *memoryTx) write(effect string) error {
	t := tx.store.table
	t.mu.Lock()
	defer t.mu.Unlock()
	if tx.ended && !tx.store.zombie {
		return errors.New("write: the transaction is over")
	}
	if tx.store.dirty || tx.ended {
		t.effects = append(t.effects, effect)
		return nil
	}
	tx.effects = append(tx.effects, effect)
	return nil
}

func (tx *memoryTx) kill() {
	tx.store.table.mu.Lock()
	defer tx.store.table.mu.Unlock()
	tx.killed = true
}

// end ends the transaction. The lock is held.
func (tx *memoryTx) end() {
	tx.ended = true
	tx.store.table.inUse--
	tx.store.table.changed.Broadcast()
}

func (tx *memoryTx) Commit(ctx context.Context, outputs []*message.Message) error {
	t := tx.store.table
	t.mu.Lock()
	defer t.mu.Unlock()
	if tx.ended {
		return errors.New("commit: the transaction is over")
	}
	if tx.killed && !tx.store.forging || tx.store.tied && tx.ctx.Err() != nil {
		tx.undo()
		return errors.New("commit: the connection is lost")
	}
	if ctx.Err() != nil && !tx.store.halfCommit {
		tx.undo()
		return fmt.Errorf("commit: %w", ctx.Err())
	}
	kept := copies(outputs)
	if tx.store.outputs != nil {
		kept = tx.store.outputs(kept)
	}
	now := time.Now()
	if tx.store.zoned {
		now = now.Add(-5 * time.Hour)
	}
	record := inbox.Record{ReceivedAt: now, ProcessedAt: now, Fingerprint: tx.claim.Fingerprint, Outputs: kept}
	if tx.store.noPrint {
		record.Fingerprint = nil
	}
	if msg := tx.claim.Message; msg != nil && tx.store.picky && slices.Contains(msg.Payload, 0xff) {
		tx.undo()
		return errors.New("commit: invalid byte sequence")
	}
	t.rows[tx.key] = &memoryRow{record: record}
	if ctx.Err() == nil {
		t.effects = append(t.effects, tx.effects...)
	}
	tx.end()
	return nil
}

// undo rolls back. The lock is held.
func (tx *memoryTx) undo() {
	t := tx.store.table
	switch {
	case tx.store.stuck:
		t.rows[tx.key] = &memoryRow{}
	case t.rows[tx.key] != nil && t.rows[tx.key].owner == tx:
		delete(t.rows, tx.key)
	}
	if tx.store.keep {
		t.effects = append(t.effects, tx.effects...)
	}
	tx.end()
}

func (tx *memoryTx) Rollback(context.Context) error {
	t := tx.store.table
	t.mu.Lock()
	defer t.mu.Unlock()
	if tx.ended {
		if tx.store.strict && tx.record == nil {
			return errors.New("rollback: the transaction is over")
		}
		return nil
	}
	tx.undo()
	return nil
}

func (s *memoryStore) IsTransient(err error) bool { return s.anything && err != nil }

func (s *memoryStore) MarkOutputsPublished(_ context.Context, keys []inbox.Key) error {
	s.table.mu.Lock()
	defer s.table.mu.Unlock()
	for key, row := range s.table.rows {
		if slices.Contains(keys, key) || s.forgetful {
			row.record.Outputs = nil
		}
	}
	return nil
}

func (s *memoryStore) DeleteExpired(_ context.Context, age time.Duration, limit int) (int, error) {
	if age < 0 {
		return 0, errors.New("delete: the age is negative")
	}
	s.table.mu.Lock()
	defer s.table.mu.Unlock()
	deleted := 0
	for key, row := range s.table.rows {
		if deleted == limit && !s.limitless {
			break
		}
		old := time.Since(row.record.ProcessedAt) > age || s.young
		if row.owner == nil && old && (len(row.record.Outputs) == 0 || s.greedy) {
			delete(s.table.rows, key)
			deleted++
		}
	}
	if s.miscounting {
		deleted++
	}
	return deleted, nil
}

func (s *memoryStore) Forget(_ context.Context, key inbox.Key) error {
	key, err := key.Normalize()
	if err != nil || s.remembers {
		return err
	}
	s.table.mu.Lock()
	defer s.table.mu.Unlock()
	delete(s.table.rows, key)
	return nil
}
