package inbox_test

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox"
)

var (
	errBegin    = errors.New("inbox: begin: scripted")
	errCommit   = errors.New("inbox: commit: scripted")
	errRollback = errors.New("inbox: rollback: scripted")
	errHandler  = errors.New("handler: scripted")
	errDeadlock = errors.New("inbox: deadlock: scripted")
)

// nativeTx is what fakeStore hands to handlers: the effects become the store's when the transaction commits.
type nativeTx struct {
	effects []string
	closed  bool
}

func (n *nativeTx) Do(effect string) { n.effects = append(n.effects, effect) }

// fakeStore is a store in memory whose calls can be made to fail.
type fakeStore struct {
	mu        sync.Mutex
	rows      map[inbox.Key]*inbox.Record
	effects   []string
	open      int // transactions
	begins    int
	rollbacks int
	claims    []inbox.Claim
	marked    []inbox.Key
	lost      bool // the connections

	onBegin    func(ctx context.Context, claim inbox.Claim) error
	onCommit   func(ctx context.Context) error // before the commit: nothing is committed if it fails
	onReply    func() error                    // after the commit: the reply that was lost
	onRollback func() error
	onMark     func() error
}

func newFakeStore() *fakeStore { return &fakeStore{rows: map[inbox.Key]*inbox.Record{}} }

func (s *fakeStore) Begin(ctx context.Context, claim inbox.Claim) (inbox.Tx, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.begins++
	s.claims = append(s.claims, claim)
	if s.onBegin != nil {
		if err := s.onBegin(ctx, claim); err != nil {
			return nil, err
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.open++
	return &fakeTx{store: s, claim: claim, record: s.rows[claim.Key], native: &nativeTx{}}, nil
}

func (s *fakeStore) IsTransient(err error) bool { return errors.Is(err, errDeadlock) }

func (s *fakeStore) MarkOutputsPublished(_ context.Context, keys []inbox.Key) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.onMark != nil {
		if err := s.onMark(); err != nil {
			return err
		}
	}
	for _, key := range keys {
		s.marked = append(s.marked, key)
		if row := s.rows[key]; row != nil {
			row.Outputs = nil
		}
	}
	return nil
}

func (s *fakeStore) row(id string) *inbox.Record {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rows[inbox.Key{Consumer: consumer, MessageID: id}]
}

func (s *fakeStore) openTransactions() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open
}

type fakeTx struct {
	store  *fakeStore
	claim  inbox.Claim
	record *inbox.Record
	native *nativeTx
}

func (tx *fakeTx) Recorded() *inbox.Record { return tx.record }
func (tx *fakeTx) Native() any             { return tx.native }

func (tx *fakeTx) Commit(ctx context.Context, outputs []*message.Message) error {
	if tx.store.onCommit != nil {
		if err := tx.store.onCommit(ctx); err != nil {
			return err
		}
	}
	tx.store.mu.Lock()
	defer tx.store.mu.Unlock()
	kept := make([]*message.Message, len(outputs))
	for i, output := range outputs {
		kept[i] = output.Copy()
	}
	now := time.Now()
	tx.store.rows[tx.claim.Key] = &inbox.Record{
		ReceivedAt: now, ProcessedAt: now, Fingerprint: tx.claim.Fingerprint, Outputs: kept,
	}
	tx.store.effects = append(tx.store.effects, tx.native.effects...)
	tx.end()
	if tx.store.onReply != nil {
		return tx.store.onReply()
	}
	return nil
}

func (tx *fakeTx) Rollback(context.Context) error {
	tx.store.mu.Lock()
	defer tx.store.mu.Unlock()
	tx.store.rollbacks++
	tx.end()
	if tx.store.onRollback != nil {
		return tx.store.onRollback()
	}
	return nil
}

func (tx *fakeTx) ConnectionLost() bool { return tx.store.lost }

func (tx *fakeTx) end() {
	if !tx.native.closed {
		tx.native.closed = true
		tx.store.open--
	}
}
