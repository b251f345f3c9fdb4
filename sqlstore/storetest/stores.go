package storetest

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox"
)

func storesShareClaims(ctx context.Context, h *Harness) error {
	if h.Another == nil {
		return skip("the harness has no other store on the table")
	}
	another, err := h.Another()
	if err != nil {
		return err
	}
	if err := process(ctx, h, claimOf("id"), message.NewMessage("output", nil)); err != nil {
		return err
	}
	record, err := recorded(ctx, another, claimOf("id"))
	if err != nil {
		return err
	}
	if len(record.Outputs) != 1 {
		return errors.New("the other store's record has no outputs")
	}
	if h.Serial != "" {
		return nil
	}
	tx, err := own(ctx, another, claimOf("held"))
	if err != nil {
		return err
	}
	return errors.Join(inFlight(ctx, h.Store, claimOf("held")), tx.Rollback(ctx))
}

// initializer is a store that creates its table.
type initializer interface {
	InitializeSchema(ctx context.Context) error
}

// onNewTable returns a store on a table that is not there yet.
func onNewTable(h *Harness) (*Harness, initializer, error) {
	if h.OnNewTable == nil {
		return nil, nil, skip("the harness has no store on another table")
	}
	store, err := h.OnNewTable()
	if err != nil {
		return nil, nil, err
	}
	schema, ok := store.(initializer)
	if !ok {
		return nil, nil, skip("the store has no InitializeSchema")
	}
	other := *h
	other.Store = store
	return &other, schema, nil
}

func tablesAreIndependent(ctx context.Context, h *Harness) error {
	other, schema, err := onNewTable(h)
	if err != nil {
		return err
	}
	if err := schema.InitializeSchema(ctx); err != nil {
		return err
	}
	if err := errors.Join(process(ctx, h, claimOf("id")), process(ctx, other, claimOf("id"))); err != nil {
		return err
	}
	return wantEffects(ctx, h, "id", "id")
}

func createsItsSchema(ctx context.Context, h *Harness) error {
	const processes = 20
	other, schema, err := onNewTable(h)
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	errs := make([]error, processes)
	start := make(chan struct{})
	for i := range processes {
		wg.Go(func() {
			<-start
			errs[i] = schema.InitializeSchema(ctx)
		})
	}
	close(start)
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%d at once: %w", processes, err)
	}
	if err := process(ctx, other, claimOf("id")); err != nil {
		return err
	}
	if err := schema.InitializeSchema(ctx); err != nil {
		return fmt.Errorf("the table is there: %w", err)
	}
	_, err = recorded(ctx, other.Store, claimOf("id"))
	return err
}

func classifiesErrors(_ context.Context, h *Harness) error {
	classifier, ok := h.Store.(inbox.TransientClassifier)
	if !ok {
		return skip("the store classifies no errors")
	}
	for _, err := range []error{
		nil, errors.New("x"), context.Canceled, context.DeadlineExceeded, inbox.ErrInFlight,
		fmt.Errorf("wrapped: %w", inbox.ErrInFlight), errors.Join(errors.New("a"), errors.New("b")),
	} {
		if classifier.IsTransient(err) {
			return errors.Join(errors.New("counts as transient"), err)
		}
	}
	return nil
}

func classifiesWrappedErrors(_ context.Context, h *Harness) error {
	classifier, ok := h.Store.(inbox.TransientClassifier)
	if !ok {
		return skip("the store classifies no errors")
	}
	if h.Transient == nil {
		return skip("the harness has no transient error")
	}
	for _, err := range []error{
		h.Transient,
		fmt.Errorf("wrapped: %w", fmt.Errorf("twice: %w", h.Transient)),
		fmt.Errorf("%w: %w", errors.New("beside another"), h.Transient),
		errors.Join(errors.New("joined"), h.Transient),
	} {
		if !classifier.IsTransient(err) {
			return fmt.Errorf("does not count as transient: %w", err)
		}
	}
	if err := fmt.Errorf("%w: %w", inbox.ErrInFlight, h.Transient); classifier.IsTransient(err) {
		return fmt.Errorf("counts as transient: %w", err)
	}
	return nil
}
