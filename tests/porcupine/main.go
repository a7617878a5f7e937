// A judge from outside: reads histories, JSON lines of operations, and says of each whether some order of its
// operations explains what they were told, and follows real time. Porcupine searches for the order.
//
//	go run . FILE...
//
// A line is an operation: its history, its name, when it was called and when it returned, and its runs; one of
// these is what it read and wrote, at one moment. An operation that has not returned may happen at any later
// time, or never. Keys that no operation has touched together are judged apart. Exits with 1 if a history is
// refused, or undecided when its time is over, and with 2 if a file cannot be read.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// There stands for any value that was read.
const there = "*"

type operation struct {
	History string
	Name    string
	Call    int64
	Return  *int64
	Runs    []run
}

// Absent values are null, and none is an empty text.
type run struct {
	Reads  map[string]*string
	Writes map[string]*string
}

func main() {
	limit := flag.Duration("limit", time.Minute, "how long to search for an order of one history")
	flag.Parse()
	names, histories, count := []string{}, map[string][]operation{}, 0
	for _, path := range flag.Args() {
		for _, op := range read(path) {
			if histories[op.History] == nil {
				names = append(names, op.History)
			}
			histories[op.History] = append(histories[op.History], op)
			count++
		}
	}
	bad := 0
	for _, name := range names {
		if fault := judge(histories[name], *limit); fault != "" {
			bad++
			fmt.Printf("%s: %s\n", name, fault)
		}
	}
	fmt.Printf("%d histories of %d operations: %d refused or undecided\n", len(names), count, bad)
	if bad > 0 {
		os.Exit(1)
	}
}

func read(path string) (ops []operation) {
	file, err := os.Open(path)
	if err == nil {
		defer file.Close()
		lines := json.NewDecoder(file)
		lines.DisallowUnknownFields()
		for err == nil {
			var op operation
			if err = lines.Decode(&op); err == nil {
				ops = append(ops, op)
			}
		}
	}
	if err != io.EOF {
		fmt.Fprintf(os.Stderr, "%s: %v\n", path, err)
		os.Exit(2)
	}
	return ops
}

// What is wrong with a history; nothing if it is right.
func judge(ops []operation, limit time.Duration) string {
	for _, part := range parts(ops) {
		keys, found := keysOf(part), []porcupine.Operation{}
		for at, op := range part {
			end := int64(math.MaxInt64)
			if op.Return != nil {
				end = *op.Return
			}
			found = append(found, porcupine.Operation{Input: op, Call: op.Call, Return: end, Metadata: at})
		}
		model := modelOf(keys)
		switch porcupine.CheckOperationsTimeout(model, found, limit) {
		case porcupine.Illegal:
			return fmt.Sprintf("refused: no order explains %s; %s", strings.Join(keys, " "), stuck(model, found))
		case porcupine.Unknown:
			return fmt.Sprintf("undecided: no order of %d operations after %v", len(part), limit)
		}
	}
	return ""
}

// The operation that returned first of those that the longest order leaves out.
func stuck(model porcupine.Model, ops []porcupine.Operation) string {
	_, info := porcupine.CheckOperationsVerbose(model, ops, 0)
	longest := map[interface{}]bool{}
	for _, order := range info.PartialLinearizationsOperations()[0] {
		if len(order) > len(longest) {
			clear(longest)
			for _, op := range order {
				longest[op.Metadata] = true
			}
		}
	}
	first := porcupine.Operation{Return: math.MaxInt64}
	for _, op := range ops {
		if !longest[op.Metadata] && op.Return < first.Return {
			first = op
		}
	}
	text, _ := json.Marshal(first.Input)
	return fmt.Sprintf("%d of %d have one, this is the next: %s", len(longest), len(ops), text)
}

// The operations, by the keys that belong together.
func parts(ops []operation) map[string][]operation {
	parent := map[string]string{}
	var root func(key string) string
	root = func(key string) string {
		if up, ok := parent[key]; ok && up != key {
			parent[key] = root(up)
			return parent[key]
		}
		return key
	}
	for _, op := range ops {
		for _, key := range keysOf([]operation{op}) {
			parent[root(key)] = root(keysOf([]operation{op})[0])
		}
	}
	found := map[string][]operation{}
	for _, op := range ops {
		if keys := keysOf([]operation{op}); len(keys) > 0 {
			found[root(keys[0])] = append(found[root(keys[0])], op)
		}
	}
	return found
}

func keysOf(ops []operation) []string {
	found := map[string]bool{}
	for _, op := range ops {
		for _, run := range op.Runs {
			for key := range run.Reads {
				found[key] = true
			}
			for key := range run.Writes {
				found[key] = true
			}
		}
	}
	keys := []string{}
	for key := range found {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

// Registers that hold nothing at first. A state has the value of each, in the order of `keys`; an operation
// goes on from it by each run that read what is there, and by none if it may never have happened.
func modelOf(keys []string) porcupine.Model {
	model := porcupine.NondeterministicModel{
		Init: func() []interface{} { return []interface{}{make([]string, len(keys))} },
		Step: func(state, input, _ interface{}) (next []interface{}) {
			vals, op := state.([]string), input.(operation)
			for _, run := range op.Runs {
				if after := apply(run, keys, vals); after != nil {
					next = append(next, after)
				}
			}
			if op.Return == nil {
				next = append(next, vals)
			}
			return next
		},
		Equal: func(one, other interface{}) bool { return slices.Equal(one.([]string), other.([]string)) },
	}
	return model.ToModel()
}

// The values after a run, or nil if it read others.
func apply(run run, keys, vals []string) []string {
	for at, key := range keys {
		seen, reads := run.Reads[key]
		if reads && text(seen) != vals[at] && (text(seen) != there || vals[at] == "") {
			return nil
		}
	}
	after := slices.Clone(vals)
	for at, key := range keys {
		if val, writes := run.Writes[key]; writes {
			after[at] = text(val)
		}
	}
	return after
}

func text(val *string) string {
	if val == nil {
		return ""
	}
	return *val
}
