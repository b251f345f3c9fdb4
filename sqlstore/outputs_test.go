package sqlstore_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/sqlstore"
)

func TestOutputsAreRecordedByteForByte(t *testing.T) {
	t.Parallel()
	forEach(t, append(targets(), pgxWrapped), func(t *testing.T, target target) {
		store, _, _ := newStore(t, target)
		want := []*message.Message{
			message.NewMessage("z", nil),
			message.NewMessage("", []byte{}),
			message.NewMessage("\xff\x00", []byte("\x00\xff\u0000'\\\"\r\n\x1a")),
			{UUID: "without metadata", Payload: []byte("a")},
			message.NewMessage("5 MB", bytes.Repeat([]byte("\x00\xffab'"), 1<<20)),
		}
		want[2].Metadata = message.Metadata{"\xfe": "\x00\xff", "": "empty", "a": ""}
		process(t, store, "m", want...)

		got := recorded(t, store, "m").Outputs
		if len(got) != len(want) {
			t.Fatalf("%d outputs, want %d", len(got), len(want))
		}
		for i := range want {
			if !got[i].Equals(want[i]) && want[i].Metadata != nil || got[i].UUID != want[i].UUID || got[i].Metadata == nil {
				t.Errorf("output %d differs", i)
			}
		}
	})
}

func TestPayloadMetadataAndFingerprintAreStored(t *testing.T) {
	t.Parallel()
	forEach(t, targets(), func(t *testing.T, target target) {
		store, db, table := newStore(t, target)
		for id, payload := range map[string]message.Payload{
			"bytes": []byte("\x00\xff{"), "empty": {}, "nil": nil, "not stored": nil,
		} {
			claim := claimOf(id)
			if id != "not stored" {
				claim.Message = message.NewMessage(id, payload)
				claim.Message.Metadata.Set("trace", "\xff")
				claim.Fingerprint = []byte{0, 1, 255}
			}
			tx, err := store.Begin(t.Context(), claim)
			if err != nil {
				t.Fatal(err)
			}
			if err := tx.Commit(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
			if got := recorded(t, store, id).Fingerprint; !bytes.Equal(got, claim.Fingerprint) || (got == nil) != (claim.Fingerprint == nil) {
				t.Errorf("%s: fingerprint %x, want %x", id, got, claim.Fingerprint)
			}
			var (
				stored                []byte
				noPayload, noMetadata bool
			)
			query := "SELECT payload, payload IS NULL, metadata IS NULL FROM " + table + " WHERE message_id = '" + id + "'"
			if err := db.QueryRowContext(t.Context(), query).Scan(&stored, &noPayload, &noMetadata); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(stored, payload) {
				t.Errorf("%s: payload %x, want %x", id, stored, payload)
			}
			if want := id == "not stored"; noPayload != want || noMetadata != want {
				t.Errorf("%s: payload stored %t, metadata stored %t", id, !noPayload, !noMetadata)
			}
		}
	})
}

func TestMarkedOutputsAreForgotten(t *testing.T) {
	t.Parallel()
	forEach(t, targets(), func(t *testing.T, target target) {
		store, db, table := newStore(t, target)
		var keys []inbox.Key
		for i := range 450 { // more than one statement's worth
			keys = append(keys, inbox.Key{Consumer: "nobody", MessageID: fmt.Sprint(i)})
		}
		for _, id := range []string{"kept", "marked", "also marked", "sha256:abc"} {
			process(t, store, id, message.NewMessage("of "+id, []byte("payload")))
		}
		process(t, store, "without")
		keys = slices.Insert(keys, 225, claimOf("marked").Key, claimOf("also marked").Key, claimOf("without").Key,
			claimOf("marked").Key, claimOf("sha256:abc").Key)
		for range 2 {
			if err := store.MarkOutputsPublished(t.Context(), keys); err != nil {
				t.Fatal(err)
			}
			for id, want := range map[string]int{"kept": 1, "marked": 0, "also marked": 0, "without": 0, "sha256:abc": 0} {
				if got := recorded(t, store, id).Outputs; len(got) != want {
					t.Errorf("%s has %d outputs, want %d", id, len(got), want)
				}
			}
		}
		var published int
		if err := db.QueryRowContext(t.Context(), "SELECT count(outputs_published_at) FROM "+table).Scan(&published); err != nil {
			t.Fatal(err)
		}
		if published != 3 {
			t.Errorf("%d rows are marked, want 3", published)
		}
		if err := store.MarkOutputsPublished(t.Context(), nil); err != nil {
			t.Error(err)
		}
	})
}

// TestMarkingWaitsForNoClaim has a claim in flight on a small table.
func TestMarkingWaitsForNoClaim(t *testing.T) {
	t.Parallel()
	forEach(t, []target{pgxStdlib, libPQ, mariaDB}, func(t *testing.T, target target) {
		store, _, _ := newStore(t, target)
		var keys []inbox.Key
		for i := range 10 {
			process(t, store, fmt.Sprint(i), message.NewMessage("output", nil))
			keys = append(keys, claimOf(fmt.Sprint(i)).Key)
		}
		begin(t, store, "5 in flight")
		if err := store.MarkOutputsPublished(t.Context(), keys); err != nil {
			t.Fatal(err)
		}
		if got, err := store.CountStranded(t.Context(), 0); err != nil || got != 0 {
			t.Errorf("%d are not marked, %v", got, err)
		}
	})
}

type publisher struct {
	err       error
	published []string
}

func (p *publisher) Publish(topic string, msgs ...*message.Message) error {
	if p.err != nil {
		return p.err
	}
	for _, msg := range msgs {
		if msg.Context() == nil {
			return errors.New("no context")
		}
		p.published = append(p.published, topic+":"+msg.UUID)
	}
	return nil
}

func (p *publisher) Close() error { return nil }

func TestStrandedOutputsAreListedInPagesAndPublished(t *testing.T) {
	t.Parallel()
	forEach(t, targets(), func(t *testing.T, target target) {
		store, db, table := newStore(t, target)
		const count = 7
		for i := range count {
			process(t, store, fmt.Sprint(i), message.NewMessage(fmt.Sprint("a", i), nil), message.NewMessage(fmt.Sprint("b", i), nil))
			age(t, db, table, fmt.Sprint(i), time.Hour)
		}
		for _, id := range []int{2, 3, 4, 5} { // received at the same time
			mustExec(t, db, fmt.Sprintf("UPDATE %s SET received_at = '2020-01-01 00:00:00.123' WHERE message_id = '%d'", table, id))
		}
		process(t, store, "young", message.NewMessage("c", nil))
		process(t, store, "without")
		age(t, db, table, "without", time.Hour)

		var (
			listed []string
			after  *sqlstore.StrandedOutputs
		)
		for {
			page, err := store.ListStranded(t.Context(), sqlstore.ListStrandedParams{OlderThan: time.Minute, Limit: 3, After: after})
			if err != nil {
				t.Fatal(err)
			}
			for _, stranded := range page {
				listed = append(listed, stranded.Key.MessageID)
			}
			if len(page) < 3 {
				break
			}
			after = &page[len(page)-1]
		}
		slices.Sort(listed)
		if got := fmt.Sprint(listed); got != "[0 1 2 3 4 5 6]" {
			t.Errorf("listed %s", got)
		}
		for olderThan, want := range map[time.Duration]int64{0: count + 1, time.Minute: count, 2 * time.Hour: 4} {
			if got, err := store.CountStranded(t.Context(), olderThan); err != nil || got != want {
				t.Errorf("%d are stranded for %s, want %d, %v", got, olderThan, want, err)
			}
		}

		all, err := store.ListStranded(t.Context(), sqlstore.ListStrandedParams{OlderThan: time.Minute})
		if err != nil || len(all) != count {
			t.Fatalf("listed %d, want %d, %v", len(all), count, err)
		}
		broken := errors.New("broken")
		if err := store.PublishStranded(t.Context(), all[0], "topic", &publisher{err: broken}); !errors.Is(err, broken) {
			t.Errorf("error %v, want the publisher's", err)
		}
		var p publisher
		for _, stranded := range all {
			if err := store.PublishStranded(t.Context(), stranded, "topic", &p); err != nil {
				t.Fatal(err)
			}
		}
		if len(p.published) != 2*count || p.published[1] != "topic:b"+all[0].Key.MessageID {
			t.Errorf("published %q", p.published)
		}
		if got, err := store.CountStranded(t.Context(), time.Minute); err != nil || got != 0 {
			t.Errorf("%d are stranded after they were published, %v", got, err)
		}
	})
}

func TestStrandedParametersAreChecked(t *testing.T) {
	t.Parallel()

	store, _, _ := newStore(t, sqliteOne)
	for _, params := range []sqlstore.ListStrandedParams{{OlderThan: -1}, {Limit: -1}} {
		_, err := store.ListStranded(t.Context(), params)
		wantError(t, err, nil, "inbox: ", "negative")
	}
	_, err := store.CountStranded(t.Context(), -1)
	wantError(t, err, nil, "inbox: ", "negative")
}

func TestCorruptOutputsAreAnError(t *testing.T) {
	t.Parallel()
	forEach(t, dialectTargets, func(t *testing.T, target target) {
		store, db, table := newStore(t, target)
		process(t, store, "m", message.NewMessage("output", nil))
		literal := "X'02FF'"
		if target.dialect == sqlstore.PostgreSQL {
			literal = `'\x02FF'::bytea`
		}
		mustExec(t, db, "UPDATE "+table+" SET outputs = "+literal)
		_, err := store.Begin(t.Context(), claimOf("m"))
		wantError(t, err, nil, "inbox: ", "corrupt")
		_, err = store.ListStranded(context.WithoutCancel(t.Context()), sqlstore.ListStrandedParams{})
		wantError(t, err, nil, "inbox: ", `"m"`, "corrupt")
	})
}
